"""Defines what the buffer knows of a group, as plain values that a journal can keep."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from async_rl.base.messages.codec import GroupColumns
from async_rl.base.types import Slot
from buffer.frames import Frame

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
    """Holds all that the buffer knows of one group. A change makes a new one, so a journal may keep the old one.

    It is a tuple, which is fast to make, because groups change very often. The fields before `outcome`, then those of
    `outcome`, are the columns of the journal's table of groups, in that order; only its final_version is in no row.
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
