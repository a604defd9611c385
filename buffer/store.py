"""The buffer's state, in memory: who runs what, what is finished, what the learner holds. No I/O and no clock.

    admit --> running --finish--> finished --take--> held by the learner --trained--> slot free once that is served
                 |                    |                    ^                |
                 +--late, failed      +--late,             +---- used <-----+--> trained for the last time
                    shutdown             zero_variance,
                                         shutdown

All of it is one Row for each live group and a few scalars, so a journal can keep it: see
buffer.store_state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from async_rl.errors import StalenessError, WireError
from async_rl.types import Slot
from buffer.frames import Frame
from buffer.staleness import (
    Rules,
    admission_capacity,
    deadline,
    exact_start_version,
    fresh_to_take,
    last_batch,
    overfull_deadline,
    vacant_places,
)
from buffer.store_rows import Outcome, Row
from buffer.store_state import StoreState

EQUAL_BATCHES = 8
"""So many batches' worth of groups in a row, all rewards equal, say that the task has nothing left to teach."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One batch, as the learner gets it, ordered by group id."""

    version: int
    groups: tuple[Row, ...]


class Store:
    """Groups from admission to the release of their slots, under the rules of buffer.staleness.

    Nothing is admitted before the first `served`. Every call that changes state is idempotent, because a client that
    missed the answer asks again. After each of them `state` is consistent, which is when a journal may commit.
    """

    def __init__(self, rules: Rules, state: StoreState | None = None) -> None:
        self.rules = rules
        self.state = state or StoreState()
        self.ended = ""
        """Why no batch is likely to come any more; empty while there may be one."""
        self._aborts: dict[str, list[int]] = {}  # [worker] running groups that were dropped, until it has heard so
        self._equal = (0, 0.0)  # groups of equal rewards in a row, their reward
        self._is_draining = False

    # --- the worker's side

    def capacity(self) -> int:
        """Groups that may start now."""
        if self._is_draining or self.state.served_version is None:
            return 0
        return admission_capacity(self.state.slots_held, self.rules)

    def running_by_worker(self) -> Counter[str]:
        return Counter(row.worker for row in self.state.running.values())

    def admit(self, worker: str, max_groups: int, now_s: float, grant: int = 0) -> list[Slot]:
        """Up to `max_groups` slots, as many as there are; prompts that were requeued go first."""
        number = min(max_groups, self.capacity())
        places = self._places(number) if self.rules.exact else [-1] * number
        slots = []
        for batch in places:
            assert self.state.served_version is not None
            row = Row(
                group_id=self.state.next_group_id, prompt_index=self._next_prompt_index(),
                start_version=self.state.served_version, worker=worker, grant=grant, granted_s=now_s, batch=batch,
            )
            self.state.next_group_id += 1
            self.state.account.admitted += 1
            self.state.put(row, "running")
            slots.append(row.slot)
        return slots

    def running_slot(self, group_id: int, worker: str) -> Slot | None:
        """The slot of a group that `worker` runs; None once it is finished or dropped.

        Raises:
            WireError: never granted, or granted to another worker.
        """
        if group_id >= self.state.next_group_id:
            granted = f"one that was granted ({self.state.next_group_id} so far)"
            raise WireError(f"group_id: got {group_id}, allowed {granted}")
        row = self.state.running.get(group_id)
        if row is None:
            return None
        if row.worker != worker:
            raise WireError(f"worker: got {worker!r}, allowed {row.worker!r}, who was granted group {group_id}")
        return row.slot

    def finish(self, group_id: int, payload: Frame, outcome: Outcome, drop_equal: bool = False) -> None:
        """A running group has arrived whole. With `drop_equal` it is dropped if its rewards are all equal."""
        assert self.state.served_version is not None
        row, version = self.state.running[group_id], self.state.served_version
        arrived: dict[str, Any] = {"payload": payload, "outcome": outcome, "finished_version": version}
        if drop_equal and outcome.equal_rewards:
            self.state.drop(row._replace(**arrived), "zero_variance", requeue=False)
            self._count_equal(outcome.reward)
        else:
            self._equal, self.ended = (0, 0.0), ""
            self.state.put(row, "finished", **arrived)

    def fail(self, group_id: int, cause: str, requeue: bool) -> None:
        """A running group ends without a result: its slot is free. With `requeue` its prompt is granted again."""
        self.state.account.last_failure = cause
        self.state.drop(self.state.running[group_id], "failed", requeue)

    def abandon(self, worker: str) -> int:
        """The worker is gone: its running groups fail and their prompts are granted again. Returns their number."""
        lost = [group_id for group_id, row in self.state.running.items() if row.worker == worker]
        for group_id in lost:
            self.fail(group_id, f"{worker} is gone", requeue=True)
        self._aborts.pop(worker, None)
        return len(lost)

    def aborts(self, worker: str) -> list[int]:
        """Groups that `worker` runs for nothing, as they were dropped, until `forget_aborts`."""
        return self._aborts.get(worker, [])

    def forget_aborts(self, worker: str, group_ids: Iterable[int]) -> None:
        """The worker has heard of these."""
        heard = set(group_ids)
        self._aborts[worker] = [group_id for group_id in self.aborts(worker) if group_id not in heard]

    # --- the learner's side

    def check_takeable(self, version: int) -> None:
        """
        Raises:
            WireError: batch `version` is not the one the learner is at.
        """
        if version != self.state.version:
            raise WireError(f"version: got {version}, allowed {self.state.version}, the batches trained so far")

    def take(self, version: int, now_s: float = 0.0) -> Taken | None:
        """Batch number `version` for the learner, who holds it until `trained`; None while it has to wait.

        Raises:
            WireError: see check_takeable.
            StalenessError: a group has missed its deadline.
        """
        self.check_takeable(version)
        if not self.state.held:
            if self.rules.late == "mask":
                self._drop_late(self.state.finished.values(), version, now_s)
            chosen = self._choose(version)
            if chosen is None:
                return None
            for row in chosen:
                self._check_bound(row, version)
                self.state.put(row, "held")
            if self.rules.late == "drop":  # the rest with this deadline can only miss it
                self._drop_late([*self.state.running.values(), *self.state.finished.values()], version + 1, now_s)
        return Taken(version, tuple(self.state.held[group_id] for group_id in sorted(self.state.held)))

    def trained(self, version: int) -> None:
        """The held batch was trained on and yielded `version`, whose tokens are legal from now on.

        Raises:
            WireError: the learner holds no batch that yields this version.
        """
        if version == self.state.version:
            return
        if not self.state.held or version != self.state.version + 1:
            held = f"holds batch {self.state.version}" if self.state.held else "holds no batch"
            raise WireError(f"version: got {version}, allowed the next after {self.state.version}; the learner {held}")
        self.state.unserved[version] = self.state.num_held_fresh
        self.state.version = version
        for row in list(self.state.held.values()):
            self.state.account.train(row)
            uses = (*row.trained_versions, version - 1)
            is_last = len(uses) >= self.rules.max_uses
            self.state.put(row, "trained" if is_last else "used", trained_versions=uses)
        for row in list(self.state.used.values()):
            if self._last_batch(row) < version:
                self.state.put(row, "trained")

    def may_push(self) -> bool:
        """Whether the newest version may be served. With `drain`, which must ask, nothing starts from now to `served`.

        With `drain` it may once nothing runs; in exact mode once all of the old version is done; else always.
        """
        if self.rules.exact:
            return not (self.state.running or self.capacity())
        self._is_draining = self.rules.drain
        return not (self._is_draining and self.state.running)

    def served(self, version: int) -> None:
        """Every live server serves `version` or a later one: slots of the groups trained into it are free.

        Raises:
            WireError: this version was not trained yet, or the served version would fall.
        """
        lowest = self.state.served_version or 0
        if not lowest <= version <= self.state.version:
            raise WireError(f"version: got {version}, allowed {lowest}..{self.state.version} (served..trained)")
        self.state.served_version = version
        self._is_draining = False
        for trained_version in [v for v in self.state.unserved if v <= version]:
            del self.state.unserved[trained_version]

    # --- the end, the account, and what others see

    def close(self) -> None:
        """The run is over: what runs or waits is dropped as `shutdown`. A held batch stays the learner's."""
        for row in [*self.state.running.values(), *self.state.finished.values()]:
            self.state.drop(row, "shutdown", requeue=False)
        for row in list(self.state.used.values()):
            self.state.put(row, "trained")
        self.state.check_identity()

    def describe(self, now_s: float) -> str:
        """What a batch is waiting for, for the error of whoever waits."""
        size = self.rules.prompts_per_step
        parts = [f"{len(self.state.finished)} of {size} groups finished"]
        if self.state.running:
            oldest = min(self.state.running.values(), key=lambda row: row.granted_s)
            age_s = now_s - oldest.granted_s
            parts.append(f"{len(self.state.running)} running (oldest {age_s:.0f} s, worker {oldest.worker})")
        else:
            parts.append("0 running")
        if len(self.state.finished) >= size and (expiring := self._expiring()):
            parts.append(expiring)
        served = self.state.served_version
        parts.append("no version served yet" if served is None else f"served version {served}")
        if self.state.account.last_failure:
            failed = self.state.account.dropped["failed"]
            parts.append(f"{failed} failed so far, the last one: {self.state.account.last_failure}")
        return ", ".join(parts)

    # --- inside

    def _drop_late(self, rows: Iterable[Row], version: int, now_s: float) -> None:
        """Drop those that may not be in batch `version` or a later one; whoever runs one is told to abort it."""
        for row in list(rows):
            if self._last_batch(row) < version:
                if row.state == "running":
                    self._aborts.setdefault(row.worker, []).append(row.group_id)
                self.state.drop(row, "late", requeue=True, now_s=now_s)

    def _count_equal(self, reward: float) -> None:
        number, before = self._equal
        self._equal, self.ended = (number + 1, reward) if number and reward == before else (1, reward), ""
        if self._equal[0] >= EQUAL_BATCHES * self.rules.prompts_per_step:
            self.ended = (
                f"{self._equal[0]} rollout groups in a row had the same reward, {reward:g}, for every answer: "
                f"the task is {'solved' if reward > 0 else 'out of reach'} and has nothing left to teach at version "
                f"{self.state.version}. Choose a {'harder' if reward > 0 else 'easier'} one."
            )

    def _choose(self, version: int) -> list[Row] | None:
        """The rows of batch `version`, or None while it has to wait."""
        if self.rules.exact:
            rows = [row for row in self.state.finished.values() if row.batch == version]
            return rows if len(rows) == self.rules.prompts_per_step else None
        if self.rules.max_uses == 1 and len(self.state.finished) < self.rules.prompts_per_step:
            return None
        used = sorted(self.state.used.values(), key=self._order)
        finished = sorted(self.state.finished.values(), key=self._order)
        fresh = fresh_to_take(
            [self._last_batch(row) for row in finished], map(self._last_batch, self.state.running.values()),
            len(used), version, self.rules,
        )
        return None if fresh is None else finished[:fresh] + used[: self.rules.prompts_per_step - fresh]

    def _order(self, row: Row) -> tuple[int, int]:
        """Earliest deadline first, ties by id; with `mask`, where the deadline is the newest token's, oldest first."""
        return row.start_version, row.group_id

    def _last_batch(self, row: Row) -> int:
        return last_batch(row.start_version, row.newest_version, self.rules)

    def _check_bound(self, row: Row, version: int) -> None:
        """
        Raises:
            StalenessError: the rules let a group through that is too old (or, in exact mode, of the wrong age).
        """
        bound = self.rules.max_staleness
        if self._last_batch(row) < version:
            raise StalenessError(
                f"group {row.group_id}, started at version {row.start_version}, would be trained on at version "
                f"{version}: over staleness.max = {bound}"
            )
        only = exact_start_version(version, bound, self.state.first_version)
        if self.rules.exact and (row.start_version, row.newest_version) != (only, only):
            raise StalenessError(
                f"group {row.group_id} of versions {row.start_version}..{row.newest_version} would be trained on at "
                f"version {version}, which takes only version {only} in exact mode"
            )

    def _places(self, number: int) -> list[int]:
        """Batch numbers for groups admitted in exact mode."""
        live = (self.state.running, self.state.finished, self.state.held)
        members = Counter(row.batch for rows in live for row in rows.values())
        return vacant_places(members, number, self.state.version + bool(self.state.held), self.rules)

    def _next_prompt_index(self) -> int:
        if self.state.requeued:
            return self.state.requeued.popleft()
        self.state.next_prompt += 1
        return self.state.next_prompt - 1

    def _expiring(self) -> str:
        """Which running groups hold up a batch that has enough finished ones."""
        if self.rules.late != "wait" or self.rules.exact:
            return ""
        bound = self.rules.max_staleness
        finished = [deadline(row.start_version, bound) for row in self.state.finished.values()]
        running = {i: deadline(row.start_version, bound) for i, row in self.state.running.items()}
        overfull = overfull_deadline(finished, running.values(), self.state.version, self.rules)
        if overfull is None:
            return ""
        late = [i for i, d in running.items() if d <= overfull]
        return f"{len(late)} of them expire by version {overfull} (first group {min(late)})"
