"""The buffer's policies, one class for each value of staleness.on_late and one for exact mode.

    policy   for                       a batch waits for running groups   what happens to a late group
    Wait     staleness.on_late: wait   that would expire otherwise        can't occur
    Drop     staleness.on_late: drop   never                              dropped, and its prompt is granted again
    Mask     staleness.on_late: mask   never                              its tokens that are too old are masked
    Exact    staleness.mode: exact     that have its batch number         can't occur

buffer/staleness.py proves that they keep the bound. A policy has no state of its own: it reads the StoreState, and the
Store does what the policy returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from async_rl.base.errors import StalenessError
from buffer.staleness import (
    Rules,
    admission_capacity,
    exact_start_version,
    fresh_at_least,
    fresh_to_take,
    overfull_deadline,
    vacant_batches,
    within_capacity,
)
from buffer.store_state import DropReason, State, StoredGroup, StoreState


class Mode(ABC):
    """Base class of the policies: they decide which groups start, form a batch or are late, and when a push begins.

    The methods here have the rules that most policies share.
    """

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.holds_admission = rules.drain and not rules.exact
        """Whether no group may start while a push waits for running groups. In exact mode it waits for new ones too."""

    def capacity(self, state: StoreState) -> int:
        """Return how many groups may start now; 0 before the first version is served."""
        return 0 if state.served_version is None else admission_capacity(state.slots_held, self.rules.slots)

    def batches_of_new(self, state: StoreState, number: int) -> list[int]:
        """Return a batch number for each of the next `number` groups; -1 lets the group join any batch."""
        return [-1] * number

    def deadline(self, row: StoredGroup) -> int:
        """Return the number of the last batch that may contain the group: start version + staleness.max."""
        return row.start_version + self.rules.max_staleness

    def too_old(self, state: StoreState, version: int) -> list[StoredGroup]:
        """Return the finished groups too old for batch `version`. The store drops them before it calls `choose`."""
        return []

    @abstractmethod
    def choose(self, state: StoreState, version: int) -> list[StoredGroup] | None:
        """Return the groups of batch `version`; None if the learner must wait for more groups."""

    def left_late(self, state: StoreState, version: int) -> list[StoredGroup]:
        """Return the groups that are too old for every batch after `version`. The store drops them after `choose`."""
        return []

    def check(self, row: StoredGroup, state: StoreState, version: int) -> None:
        """Raise StalenessError if `row`, which `choose` returned, is too old for batch `version`. That would be a bug.
        """
        if self.deadline(row) < version:
            raise StalenessError(
                f"group {row.group_id}, started at version {row.start_version}, would be trained on at version "
                f"{version}: over staleness.max = {self.rules.max_staleness}; this is a bug"
            )

    def misses_late(self, state: StoreState) -> bool:
        """Return whether enough groups have finished for a batch, so the learner waits only for groups about to expire.

        False in policies that never wait for such groups.
        """
        return False

    def describe_finished(self, state: StoreState) -> str:
        """Return a text on the state of the next batch, such as "5 of 8 groups finished"."""
        again = f", and {len(state.used)} to use again" if state.used else ""
        return f"{len(state.finished)} of {self.rules.prompts_per_step} groups finished{again}"

    def describe_late(self, state: StoreState) -> str:
        """Return a text on running groups that the next batch waits for lest they expire; "" if there are none."""
        return ""

    def may_push(self, state: StoreState) -> bool:
        """Return whether the learner may push its newest version now."""
        return not (self.rules.drain and state.running)

    def drops_at_resume(self, rows: Sequence[StoredGroup], state: StoreState, version: int) -> list[DropReason | None]:
        """Return for each finished group the reason to drop it when the run resumes at `version`; None keeps the group.

        Args:
            rows: the finished groups, sorted by deadline.
            state: exact mode sets its `first_version` if all groups are dropped.
        """
        return [None if self.deadline(row) >= version else "late" for row in rows]


_WAITED_FOR: tuple[State, State] = ("finished", "running")


class _ByDeadline(Mode):
    """Base class of Wait, Drop and Mask: a batch has the oldest fresh groups, and is filled up with used groups.

    A fresh group was in no batch yet. A used group was in one (buffer.max_uses > 1).
    """

    @abstractmethod
    def num_fresh(self, finished: Counter[int], running: Counter[int], reusable: int, version: int) -> int | None:
        """Return how many groups of batch `version` are fresh; None if the learner must wait for more groups.

        See `fresh_to_take` for the arguments.
        """

    def choose(self, state: StoreState, version: int) -> list[StoredGroup] | None:
        size, finished = self.rules.prompts_per_step, state.finished.values()
        if self.rules.max_uses == 1 and len(finished) < size:  # the usual case of a wait, without a look at all groups
            return None
        finished_by, running_by = self._by_deadline(state)
        fresh = self.num_fresh(finished_by, running_by, len(state.used), version)
        if fresh is None:
            return None
        used = sorted(state.used.values(), key=_oldest_first)[: size - fresh]
        return sorted(finished, key=_oldest_first)[:fresh] + used

    def _by_deadline(self, state: StoreState) -> tuple[Counter[int], Counter[int]]:
        """Return two counters keyed by start version + staleness.max: the numbers of finished and of running groups."""
        bound = self.rules.max_staleness
        finished, running = (
            Counter({start + bound: number for start, number in state.starts[of].items()}) for of in _WAITED_FOR
        )
        return finished, running


class Wait(_ByDeadline):
    """Policy of `staleness.on_late: wait`: the learner waits for running groups before they expire, so none does.

    It waits for a group if a batch without it would leave later batches too little room (`fresh_to_take`).
    """

    def num_fresh(self, finished: Counter[int], running: Counter[int], reusable: int, version: int) -> int | None:
        return fresh_to_take(finished, running, reusable, version, self.rules)

    def misses_late(self, state: StoreState) -> bool:
        return fresh_at_least(0, len(state.finished), len(state.used), self.rules) is not None

    def describe_late(self, state: StoreState) -> str:
        overfull = overfull_deadline(*self._by_deadline(state), state.version, self.rules)
        if overfull is None:
            return ""
        late = [i for i, row in state.running.items() if self.deadline(row) <= overfull]
        return f"{len(late)} of them expire by version {overfull} (first group {min(late)})"

    def drops_at_resume(self, rows: Sequence[StoredGroup], state: StoreState, version: int) -> list[DropReason | None]:
        return _drops_over_capacity([self.deadline(row) for row in rows], version, self.rules)


class Drop(_ByDeadline):
    """Policy of `staleness.on_late: drop`: the learner waits for no running group, and late groups are dropped.

    A group is late once all batches up to its deadline were chosen without it (`Mode.deadline`).
    """

    def num_fresh(self, finished: Counter[int], running: Counter[int], reusable: int, version: int) -> int | None:
        expiring = min(sum(n for d, n in finished.items() if d <= version), self.rules.prompts_per_step)
        return fresh_at_least(expiring, finished.total(), reusable, self.rules)

    def left_late(self, state: StoreState, version: int) -> list[StoredGroup]:
        live = (*state.running.values(), *state.finished.values())
        return [row for row in live if self.deadline(row) <= version]


class Mask(_ByDeadline):
    """Policy of `staleness.on_late: mask`: the learner waits for no running group, and masks tokens that are too old.

    A group is too old only when its newest token is."""

    def deadline(self, row: StoredGroup) -> int:
        return row.newest_version + self.rules.max_staleness

    def num_fresh(self, finished: Counter[int], running: Counter[int], reusable: int, version: int) -> int | None:
        return fresh_at_least(0, finished.total(), reusable, self.rules)

    def too_old(self, state: StoreState, version: int) -> list[StoredGroup]:
        if min(state.newest, default=version) + self.rules.max_staleness >= version:
            return []
        return [row for row in state.finished.values() if self.deadline(row) < version]


class Exact(Mode):
    """Policy of `staleness.mode: exact`: each group is admitted for one batch, whose tokens are all equally old.

    Every token is exactly staleness.max versions old. Only the first batches have younger tokens.
    """

    def batches_of_new(self, state: StoreState, number: int) -> list[int]:
        live = (state.running, state.finished, state.held)
        members = Counter(row.exact_batch for rows in live for row in rows.values())
        return vacant_batches(members, number, state.version + bool(state.held), self.rules)

    def choose(self, state: StoreState, version: int) -> list[StoredGroup] | None:
        rows = [row for row in state.finished.values() if row.exact_batch == version]
        return rows if len(rows) == self.rules.prompts_per_step else None

    def check(self, row: StoredGroup, state: StoreState, version: int) -> None:
        super().check(row, state, version)
        only = exact_start_version(version, self.rules.max_staleness, state.first_version)
        if (row.start_version, row.newest_version) != (only, only):
            raise StalenessError(
                f"group {row.group_id} of versions {row.start_version}..{row.newest_version} would be trained on at "
                f"version {version}, which takes only version {only} in exact mode; this is a bug"
            )

    def describe_finished(self, state: StoreState) -> str:
        own = sum(row.exact_batch == state.version for row in state.finished.values())
        later = f" ({len(state.finished) - own} of later batches)" if len(state.finished) > own else ""
        return f"{own} of {self.rules.prompts_per_step} groups of batch {state.version} finished{later}"

    def may_push(self, state: StoreState) -> bool:
        return not (state.running or self.capacity(state))

    def drops_at_resume(self, rows: Sequence[StoredGroup], state: StoreState, version: int) -> list[DropReason | None]:
        """Keep the groups if they fill the next staleness.max batches. Else drop all: no later version can add to them.
        """
        bound = self.rules.max_staleness
        members = Counter(
            row.exact_batch for row in rows
            if row.start_version == row.newest_version
            == exact_start_version(row.exact_batch, bound, state.first_version)
        )
        is_full = all(members[batch] == self.rules.prompts_per_step for batch in range(version, version + bound))
        if members.total() < len(rows) or not is_full:
            state.first_version = version
            return ["failed"] * len(rows)
        return _drops_over_capacity([self.deadline(row) for row in rows], version, self.rules)


_LATE: dict[str, type[Mode]] = {"wait": Wait, "drop": Drop, "mask": Mask}


def open_mode(rules: Rules) -> Mode:
    """Return the policy of these rules: Exact in exact mode, else the one of staleness.on_late."""
    return Exact(rules) if rules.exact else _LATE[rules.late](rules)


def _drops_over_capacity(deadlines: Sequence[int], version: int, rules: Rules) -> list[DropReason | None]:
    return [None if fits else "late" for fits in within_capacity(deadlines, version, rules)]


def _oldest_first(row: StoredGroup) -> tuple[int, int]:
    """Return the sort key that puts the oldest start version, which has the earliest deadline, first; ties by group id.
    """
    return row.start_version, row.group_id
