"""A group as the buffer and its journal keep it, ZMQ frames, and when a run ends for lack of reward differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import zmq

from async_rl.base.messages.codec import GroupColumns
from async_rl.base.types import Slot

Frame = bytes | zmq.Frame
"""One part of a ZMQ message. A large one stays in the memory that ZMQ received it in, and is sent on from there."""


def view(frame: Frame) -> memoryview:
    """Return the bytes of a frame without copying them."""
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def receive(socket: zmq.Socket[bytes], flags: int = 0) -> list[zmq.Frame]:
    """Wait for a message and return its frames. With zmq.NOBLOCK in `flags`, raise zmq.Again if there is no message.

    This is faster than recv_multipart, which asks the socket after each frame for more.
    """
    frames = [frame := socket.recv(flags, copy=False)]
    while frame.more:
        frames.append(frame := socket.recv(flags, copy=False))
    return frames


DropReason = Literal["late", "zero_variance", "failed", "future_version", "shutdown"]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
State = Literal["running", "finished", "held", "used", "trained", "dropped"]
"""The state of a group: running -> finished -> held by the learner -> used (may be in a batch again) or trained. A
running or finished group may also be dropped. The states `trained` and `dropped` are final."""


class Arrival(NamedTuple):
    """The facts of a finished group that rules and counts need. With them the buffer decodes each group only once."""

    newest_version: int
    response_tokens: float
    """The mean number of trained tokens of an episode."""
    reward: float
    """The mean reward of the episodes. If all rewards are equal, it is exactly that number."""
    equal_rewards: bool
    """Whether all episodes have the same reward."""
    duration_s: float

    @classmethod
    def of(cls, group: GroupColumns) -> Arrival:
        rewards = group.episode_rewards
        size, equal = len(rewards), min(rewards) == max(rewards)
        return cls(
            group.newest_version, sum(group.trained_tokens) / size, rewards[0] if equal else sum(rewards) / size, equal,
            group.facts.duration_s,
        )


class StoredGroup(NamedTuple):
    """Everything the buffer knows of one group. Immutable, so that the journal may hold an older copy.

    It is a tuple because groups change very often, and tuples are fast to make. The journal's table `groups` has the
    fields as columns, with the fields of `arrival` in place of it. trained_versions and payload have tables of their
    own.
    """

    group_id: int
    prompt_index: int
    start_version: int
    worker: str
    request_id: int = 0
    """Id of the worker's `admit` request that was granted this slot. A repeated request gets the same slots."""
    granted_s: float = 0.0
    """When the slot was granted, on the buffer's clock; only for messages and durations."""
    exact_batch: int = -1
    """Number of the batch that the group was admitted for in exact mode; -1 in other modes."""
    state: State = "running"
    drop_reason: DropReason | Literal[""] = ""
    finished_version: int = -1
    """The served version when the group arrived; -1 before that."""
    data_row: int = -1
    """The row of the prompt in task.path, or its number in another task; -1 until the group arrives or fails."""
    error: str = ""
    """The message of a group that was dropped as `failed`."""
    arrival: Arrival | None = None
    trained_versions: tuple[int, ...] = ()
    """Numbers of the batches that the group was trained in, one for each use."""
    payload: Frame = b""
    """The encoded group as it arrived; empty before that."""

    @property
    def slot(self) -> Slot:
        return Slot(group_id=self.group_id, prompt_index=self.prompt_index, start_version=self.start_version)

    @property
    def newest_version(self) -> int:
        """Version of the group's newest token; while the group runs, its start version, which is the lowest possible.
        """
        return self.arrival.newest_version if self.arrival else self.start_version

    @property
    def is_fresh(self) -> bool:
        """Whether the group was in no trained batch yet."""
        return not self.trained_versions


FLAT_BATCHES = 8
"""A run ends only after at least this many batches' worth of flat groups (all rewards equal) in a row."""
MANY_GROUPS = 4096
"""This many flat groups in a row end a run, if they are at least FLAT_BATCHES batches' worth. If all have the same
reward, an epoch of groups is enough when it is smaller. If the reward differs from group to group, an epoch is required
when it is larger. The number is large because a single group with different rewards shows that there is something to
learn. Example: if one prompt of 200 gives such a group, a gap this long between two of them has a probability of
exp(-20).
"""


def most_of_one_reward(prompts_per_step: int, epoch: int) -> int:
    """Return how many groups with one and the same reward for all answers must follow each other to end the run.

    If the policy can solve few prompts of a task, most groups have the same reward, and a few batches' worth of them in
    a row come by chance. So every prompt of an epoch has its turn first.

    Args:
        epoch: the number of prompts in an epoch; 0 if it is not known.
    """
    return max(FLAT_BATCHES * prompts_per_step, min(epoch, MANY_GROUPS))


class FlatGroups:
    """Counts flat groups in a row. In a flat group all answers got the same reward, so it has nothing to train on.

    The counts start at 0 when the buffer is restarted.

    Args:
        prompts_per_step: the number of groups in a batch.
        is_right: whether an answer with this reward counts as right.
    """

    def __init__(self, prompts_per_step: int, is_right: Callable[[float], bool]) -> None:
        self._prompts_per_step = prompts_per_step
        self._is_right = is_right
        self._reward = 0.0
        self.num_same = 0
        """Number of flat groups in a row that all have the same reward."""
        self.num_in_row = 0
        """Number of flat groups in a row, whatever the reward of each."""
        self.num_dropped = 0
        """Number of flat groups dropped since the last batch."""

    def add(self, arrival: Arrival) -> None:
        """Count an arrived group. A group with different rewards resets both counts; a new reward restarts `num_same`.
        """
        if arrival.reward != self._reward or not arrival.equal_rewards:
            self.num_same, self._reward = 0, arrival.reward
        self.num_same += arrival.equal_rewards
        self.num_in_row = self.num_in_row + 1 if arrival.equal_rewards else 0

    def why_nothing_is_left(self, version: int, epoch: int) -> str:
        """Return the message that ends the run after too many flat groups in a row; "" while the run may continue.

        Args:
            version: the policy version, for the message.
            epoch: the number of prompts in an epoch; 0 if it is not known.
        """
        if self.num_same >= most_of_one_reward(self._prompts_per_step, epoch):
            return f"{self.num_same} groups in a row had the same reward, {self._reward:g}, for every answer: " + (
                self._said_of_one_reward(version)
            )
        if self.num_in_row >= max(FLAT_BATCHES * self._prompts_per_step, MANY_GROUPS, epoch):
            return (
                f"{self.num_in_row} groups in a row had one reward for all of their answers, though not each the same: "
                "no prompt's answers differed when it was asked last, and so none seems to have anything left to teach "
                f"at version {version}. Raise rollout.group_size or rollout.temperature, choose another data set, or "
                "set algorithm.filter_zero_variance: false, with which such groups are trained on."
            )
        return ""

    def _said_of_one_reward(self, version: int) -> str:
        left = f"and to have nothing left to teach at version {version}"
        if self._is_right(self._reward):
            return f"the task seems to be solved {left}. Choose a harder one."
        if self._reward <= 0:
            return f"the task seems to be out of reach {left}. Choose an easier one, or raise rollout.group_size."
        return (
            f"the task seems to have nothing left to teach at version {version}. This reward is neither that of a "
            "right answer (eval.correct_threshold) nor 0 or less: see what gives it to every answer, and raise "
            "rollout.temperature or choose a reward that tells answers apart."
        )
