"""A group as the buffer stores it, in plain values that a journal can keep; frames of messages; runs of flat groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import zmq

from async_rl.base.messages.codec import GroupColumns
from async_rl.base.types import Slot

Frame = bytes | zmq.Frame
"""A frame of a message. A large one stays in the memory that ZMQ received it in, and is sent on from there."""


def view(frame: Frame) -> memoryview:
    """Return a view of the bytes of a frame, without copying them."""
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def receive(socket: zmq.Socket[bytes], flags: int = 0) -> list[zmq.Frame]:
    """Wait for a message and return its frames; with zmq.NOBLOCK among `flags`, raise zmq.Again if there is none.

    This is faster than recv_multipart, which asks the socket after each frame for more.
    """
    frames = [frame := socket.recv(flags, copy=False)]
    while frame.more:
        frames.append(frame := socket.recv(flags, copy=False))
    return frames


DropReason = Literal["late", "zero_variance", "failed", "future_version", "shutdown"]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)
State = Literal["running", "finished", "held", "used", "trained", "dropped"]
"""The state of a group: running -> finished -> held by the learner -> used (it may be in a batch again) or trained. A
running or a finished group may be dropped instead. The last two states are final."""


class Arrival(NamedTuple):
    """Holds what the rules and the accounting need of a finished group, so that the group is decoded only once."""

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
    """All that the buffer knows of one group. It is immutable, so the journal may keep an old one.

    It is a tuple because groups change very often, and tuples are fast to make. The journal's table of groups has its
    fields as columns, in this order, with those of `outcome` at the end. Only final_version is in no table.
    """

    group_id: int
    prompt_index: int
    start_version: int
    worker: str
    request_id: int = 0
    """Id of the worker's `admit` request that was answered with this slot: a repeated request gets the same slots."""
    granted_s: float = 0.0
    """When the slot was granted, on the buffer's clock; only for messages and durations."""
    exact_batch: int = -1
    """In exact mode the number of the batch that the group was admitted for, else -1."""
    state: State = "running"
    drop_reason: DropReason | Literal[""] = ""
    finished_version: int = -1
    """The served version when the group arrived; -1 before that."""
    data_row: int = -1
    """The row of the prompt in task.path, or its number in another task; -1 before the group arrived or failed."""
    error: str = ""
    """The cause of a drop as `failed`."""
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
        """The version of the group's newest token; of a running group its start version, the lowest possible."""
        return self.arrival.newest_version if self.arrival else self.start_version

    @property
    def is_fresh(self) -> bool:
        """Whether the group was in no trained batch yet."""
        return not self.trained_versions


FLAT_BATCHES = 8
"""The fewest batches' worth of flat groups in a row that end a run."""
MANY_GROUPS = 4096
"""So many flat groups in a row, and at least FLAT_BATCHES batches' worth, end a run even if an epoch has more prompts.
If the reward changes from group to group, a run ends after no fewer, and not before an epoch of them. The number is
large because one group with a difference in reward shows that there is something to learn. Example: if one prompt of
200 gives such a group, a gap this long between two of them has a probability of exp(-20).
"""


def most_of_one_reward(prompts_per_step: int, epoch: int) -> int:
    """Return the number of flat groups in a row, all of one reward, that ends a run.

    If the policy can solve few prompts of a task, most groups have the same reward, and a few batches' worth of them in
    a row come by chance. So every prompt of an epoch has its turn first.

    Args:
        epoch: the number of prompts in an epoch; 0 if it is not known.
    """
    return max(FLAT_BATCHES * prompts_per_step, min(epoch, MANY_GROUPS))


class FlatGroups:
    """Counts flat groups: those that arrived with one and the same reward for every answer.

    A buffer that is started again counts anew.

    Args:
        prompts_per_step: the number of groups in a batch.
        is_right: whether an answer with this reward counts as right.
    """

    def __init__(self, prompts_per_step: int, is_right: Callable[[float], bool]) -> None:
        self._prompts_per_step = prompts_per_step
        self._is_right = is_right
        self._reward = 0.0
        self.num_same = 0
        """The number of flat groups in a row that all have one reward."""
        self.num_in_row = 0
        """The number of flat groups in a row, whichever the reward of each is."""
        self.num_dropped = 0
        """The number of flat groups that were dropped since the last batch."""

    def add(self, arrival: Arrival) -> None:
        """Count a group that has arrived, or begin to count anew with it."""
        if arrival.reward != self._reward or not arrival.equal_rewards:
            self.num_same, self._reward = 0, arrival.reward
        self.num_same += arrival.equal_rewards
        self.num_in_row = self.num_in_row + 1 if arrival.equal_rewards else 0

    def why_nothing_is_left(self, version: int, epoch: int) -> str:
        """Return why there is nothing left to learn at `version` from groups that are dropped; "" if there may be.

        Args:
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
