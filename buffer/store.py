"""The buffer's state, in memory: who runs what, what is finished, what the learner holds. No I/O and no clock.

    admit --> running --finish--> finished --take--> held by the learner --trained--> unserved --served--> slot free
                 |                    |
                 +--fail, abandon     +--close: dropped, with a counted reason
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

from async_rl.errors import StalenessError, WireError
from async_rl.types import Slot
from buffer.staleness import admission_capacity, choose_batch, deadline, overfull_deadline

DropReason = Literal["failed", "shutdown"]


@dataclass(frozen=True, slots=True)
class Running:
    slot: Slot
    worker: str
    granted_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    slot: Slot
    payload: bytes
    finished_version: int
    """Served version when the group arrived."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One batch, as the learner gets it, ordered by group id."""

    version: int
    groups: tuple[Finished, ...]


class Store:
    """Groups from admission to the release of their slots, under the rules of buffer.staleness.

    Nothing is admitted before the first `served`. Every call that changes state is idempotent, because a client that
    missed the answer asks again.
    """

    def __init__(self, max_staleness: int, prompts_per_step: int) -> None:
        self._max_staleness = max_staleness
        self._prompts_per_step = prompts_per_step
        self.version = 0
        """Batches trained: the newest policy version there is."""
        self.served_version: int | None = None
        self._next_group_id = 0
        self._next_prompt = 0
        self._requeued: deque[int] = deque()  # prompts to grant before fresh ones
        self._num_requeued = 0
        self._running: dict[int, Running] = {}
        self._finished: dict[int, Finished] = {}
        self._held: Taken | None = None
        self._unserved: Counter[int] = Counter()  # [version] groups trained to yield it
        self._admitted = 0
        self._trained = 0
        self._dropped: Counter[DropReason] = Counter()
        self._last_failure = ""

    @property
    def slots_held(self) -> int:
        return len(self._running) + len(self._finished) + self._num_held + self._unserved.total()

    @property
    def _num_held(self) -> int:
        return len(self._held.groups) if self._held else 0

    def capacity(self) -> int:
        """Groups that may start now."""
        if self.served_version is None:
            return 0
        return admission_capacity(self.slots_held, self._max_staleness, self._prompts_per_step)

    def running_by_worker(self) -> Counter[str]:
        return Counter(running.worker for running in self._running.values())

    def admit(self, worker: str, max_groups: int, now_s: float) -> list[Slot]:
        """Up to `max_groups` slots, as many as there are; prompts that were requeued go first."""
        slots = []
        for _ in range(min(max_groups, self.capacity())):
            assert self.served_version is not None
            slot = Slot(
                group_id=self._next_group_id, prompt_index=self._next_prompt_index(), start_version=self.served_version
            )
            self._next_group_id += 1
            self._admitted += 1
            self._running[slot.group_id] = Running(slot, worker, now_s)
            slots.append(slot)
        return slots

    def running_slot(self, group_id: int, worker: str) -> Slot | None:
        """The slot of a group that `worker` runs; None once it is finished or dropped.

        Raises:
            WireError: never granted, or granted to another worker.
        """
        if group_id >= self._next_group_id:
            granted = f"one that was granted ({self._next_group_id} so far)"
            raise WireError(f"group_id: got {group_id}, allowed {granted}")
        running = self._running.get(group_id)
        if running is None:
            return None
        if running.worker != worker:
            raise WireError(f"worker: got {worker!r}, allowed {running.worker!r}, who was granted group {group_id}")
        return running.slot

    def finish(self, group_id: int, payload: bytes) -> None:
        """A running group has arrived whole."""
        assert self.served_version is not None
        slot = self._running.pop(group_id).slot
        self._finished[group_id] = Finished(slot, payload, self.served_version)

    def fail(self, group_id: int, cause: str, requeue: bool) -> None:
        """A running group ends without a result: its slot is free. With `requeue` its prompt is granted again."""
        slot = self._running.pop(group_id).slot
        self._dropped["failed"] += 1
        self._last_failure = cause
        if requeue:
            self._requeued.append(slot.prompt_index)
            self._num_requeued += 1

    def abandon(self, worker: str) -> int:
        """The worker is gone: its running groups fail and their prompts are granted again. Returns their number."""
        lost = [group_id for group_id, running in self._running.items() if running.worker == worker]
        for group_id in lost:
            self.fail(group_id, f"{worker} is gone", requeue=True)
        return len(lost)

    def check_takeable(self, version: int) -> None:
        """
        Raises:
            WireError: batch `version` is not the one the learner is at.
        """
        if version != self.version:
            raise WireError(f"version: got {version}, allowed {self.version}, the batches trained so far")

    def take(self, version: int) -> Taken | None:
        """Batch number `version` for the learner, who holds it until `trained`; None while it has to wait.

        Raises:
            WireError: see check_takeable.
            StalenessError: a group has missed its deadline.
        """
        self.check_takeable(version)
        if self._held:
            return self._held
        chosen = choose_batch(
            self._finished_deadlines(), self._running_deadlines(), version, self._max_staleness, self._prompts_per_step
        )
        if chosen is None:
            return None
        groups = tuple(self._finished.pop(group_id) for group_id in chosen)
        for slot in (group.slot for group in groups):
            if self._deadline(slot) < version:
                raise StalenessError(
                    f"group {slot.group_id}, started at version {slot.start_version}, would be trained on at version "
                    f"{version}: over staleness.max = {self._max_staleness}"
                )
        self._held = Taken(version, groups)
        return self._held

    def trained(self, version: int) -> None:
        """The held batch was trained on and yielded `version`, whose tokens are legal from now on.

        Raises:
            WireError: the learner holds no batch that yields this version.
        """
        if version == self.version:
            return
        if self._held is None or version != self.version + 1:
            held = f"holds batch {self._held.version}" if self._held else "holds no batch"
            raise WireError(f"version: got {version}, allowed the next after {self.version}; the learner {held}")
        self.version = version
        self._trained += len(self._held.groups)
        self._unserved[version] = len(self._held.groups)
        self._held = None

    def served(self, version: int) -> None:
        """Every live server serves `version` or a later one: slots of the groups trained into it are free.

        Raises:
            WireError: this version was not trained yet, or the served version would fall.
        """
        lowest = self.served_version or 0
        if not lowest <= version <= self.version:
            raise WireError(f"version: got {version}, allowed {lowest}..{self.version} (served..trained)")
        self.served_version = version
        for trained_version in [v for v in self._unserved if v <= version]:
            del self._unserved[trained_version]

    def close(self) -> None:
        """The run is over: what runs or waits is dropped as `shutdown`. A held batch stays the learner's."""
        self._dropped["shutdown"] += len(self._running) + len(self._finished)
        self._running.clear()
        self._finished.clear()
        self.check_identity()

    def check_identity(self) -> None:
        """
        Raises:
            StalenessError: admitted = trained + dropped + running + buffered + held by the learner does not hold.
        """
        accounted = {
            "trained": self._trained, "dropped": self._dropped.total(), "running": len(self._running),
            "buffered": len(self._finished), "held by the learner": self._num_held,
        }
        if self._admitted != sum(accounted.values()):
            raise StalenessError(f"{self._admitted} groups were admitted, but the account is {accounted}")

    def counters(self) -> dict[str, float]:
        """Numbers of groups: depth, running, held (by the learner) and slots_held now, the others since the start.

        Requeued ones are among the dropped.
        """
        return {
            "buffer/depth": float(len(self._finished)),
            "buffer/running": float(len(self._running)),
            "buffer/held": float(self._num_held),
            "buffer/slots_held": float(self.slots_held),
            "buffer/admitted": float(self._admitted),
            "buffer/trained": float(self._trained),
            "buffer/dropped_failed": float(self._dropped["failed"]),
            "buffer/dropped_shutdown": float(self._dropped["shutdown"]),
            "buffer/requeued": float(self._num_requeued),
        }

    def describe(self, now_s: float) -> str:
        """What a batch is waiting for, for the error of whoever waits."""
        parts = [f"{len(self._finished)} of {self._prompts_per_step} groups finished"]
        if self._running:
            oldest = min(self._running.values(), key=lambda running: running.granted_s)
            age_s = now_s - oldest.granted_s
            parts.append(f"{len(self._running)} running (oldest {age_s:.0f} s, worker {oldest.worker})")
        else:
            parts.append("0 running")
        if len(self._finished) >= self._prompts_per_step and (expiring := self._expiring()):
            parts.append(expiring)
        served = "no version served yet" if self.served_version is None else f"served version {self.served_version}"
        parts.append(served)
        if self._last_failure:
            parts.append(f"{self._dropped['failed']} failed so far, the last one: {self._last_failure}")
        return ", ".join(parts)

    def _expiring(self) -> str:
        """Which running groups hold up a batch that has enough finished ones."""
        left = sorted(self._finished_deadlines())[self._prompts_per_step :]
        deadlines = [*self._running_deadlines(), *(d for d, _ in left)]
        overfull = overfull_deadline(deadlines, self.version, self._max_staleness, self._prompts_per_step)
        if overfull is None:
            return ""
        late = [i for i, running in self._running.items() if self._deadline(running.slot) <= overfull]
        return f"{len(late)} of them expire by version {overfull} (first group {min(late)})"

    def _next_prompt_index(self) -> int:
        if self._requeued:
            return self._requeued.popleft()
        self._next_prompt += 1
        return self._next_prompt - 1

    def _deadline(self, slot: Slot) -> int:
        return deadline(slot.start_version, self._max_staleness)

    def _finished_deadlines(self) -> list[tuple[int, int]]:
        return [(self._deadline(group.slot), group_id) for group_id, group in self._finished.items()]

    def _running_deadlines(self) -> list[int]:
        return [self._deadline(running.slot) for running in self._running.values()]
