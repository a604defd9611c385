"""Simulates the utilisation of learner and rollout pool for values of `staleness.max`, event by event.

Groups take lognormal times, which are longer the more groups are in flight. The learner takes `train_s` for a batch,
then `sync_s` for a push. During the push sampling pauses for `pause_s`. Only durations are simulated: the real Store
decides on admission, hand-out, release, late groups and, with `drain`, the wait before a push. With `late: drop` a
group is aborted at the hand-out after which it can only miss its deadline.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from async_rl.base.config import SlotLimits, StalenessConfig
from async_rl.base.config.check import check
from buffer.staleness import Rules
from buffer.store import Store
from buffer.store_state import Arrival

WORKER = "rollout/0"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The settings and durations of a simulated run. Durations are in seconds of simulated time."""

    concurrency: int = 64
    """The largest number of groups in flight, at all servers together."""
    servers: int = 1
    """The number of rollout servers. They share the groups in flight evenly."""
    prompts_per_step: int = 64
    train_s: float = 10.0
    train_cv: float = 0.0
    sync_s: float = 0.5
    pause_s: float | None = None
    """How long generation pauses during a push, at most sync_s; None: all of sync_s."""
    receive_s: float = 0.0
    """How long the learner takes to receive a complete batch."""
    group_mean_s: float = 8.0
    """The mean duration of a group that runs alone."""
    group_cv: float = 1.0
    """The standard deviation of a group's duration over its mean."""
    load_s: float = 0.0
    """How much longer a group takes for each other group in flight at its server. 0: the engine has room. group_mean_s:
    the engine is full, and its throughput no longer grows."""
    failed: float = 0.0
    """The share of groups that are dropped when they finish, because their reward failed or they have zero variance."""
    every_steps: int = 1
    late: Literal["wait", "drop", "mask"] = "wait"
    max_uses: int = 1
    fresh_fraction: float = 1.0
    drain: bool = False
    """Like weight_sync.on_update=drain: a push waits for the groups in flight, and no group starts meanwhile."""

    @property
    def standstill_s(self) -> float:
        return self.sync_s if self.pause_s is None else min(self.pause_s, self.sync_s)

    @property
    def fresh_per_step(self) -> int:
        return math.ceil(self.fresh_fraction * self.prompts_per_step)

    @property
    def slot_limits(self) -> SlotLimits:
        """The rule that maps a depth to slots, with the fewest slots that the run needs."""
        return SlotLimits(
            prompts_per_step=self.prompts_per_step, fresh_per_step=self.fresh_per_step, every_steps=self.every_steps,
            max_uses=self.max_uses,
        )

    def group_s(self, in_flight: float) -> float:
        """Return the mean duration of a group while `in_flight` groups run at all servers, including that group."""
        return self.group_mean_s + self.load_s * max(0.0, in_flight / self.servers - 1)


@dataclass(frozen=True)
class Result:
    utilisation: float
    """The learner's training time as a share of the whole time."""
    mean_staleness: float
    """Mean over the trained groups of the batch's version minus the version of the oldest trained token. That token has
    the group's start version; with staleness.on_late=mask, the oldest version that is not masked."""
    max_staleness: int
    rollout: float
    """The share of time with at least one group in flight and no pause for a push."""
    in_flight: float
    """Mean number of groups in flight over time, divided by `concurrency`. (The metric occupancy/rollout counts
    requests.)
    """
    step_s: float
    dropped: float
    """Late groups as a share of late and trained groups."""


def simulate(
    workload: Workload, max_staleness: int, steps: int, seed: int = 0, depth: float | None = None
) -> Result:
    """Simulate `steps` > 1 learner steps from an empty buffer, and return the utilisation, staleness and times.

    All results count from the end of the first step, as in measured runs. With the same seed and workload the n-th
    group takes the same time at each depth and bound, so results differ only by depth and bound.

    Args:
        depth: as staleness.depth, at most `max_staleness`; None: `max_staleness`.

    Raises:
        ConfigError: the depth has too few slots, so that the learner would wait for ever.
    """
    depth = max_staleness if depth is None else depth
    limits = workload.slot_limits
    check(
        limits.is_enough(depth), "staleness.depth", depth,
        f"at least {limits.smallest_depth:g} with {workload.prompts_per_step} groups a step, "
        f"{workload.fresh_per_step} of them fresh, and weight_sync.every_steps {workload.every_steps}",
    )
    return _Simulation(workload, StalenessConfig(max=max_staleness, depth=depth), seed).run(steps)


class _Simulation:
    """One simulation and its state.

    Groups run on a work clock. It runs slower the more groups are in flight, and stops while a push pauses generation.
    """

    def __init__(self, workload: Workload, staleness: StalenessConfig, seed: int) -> None:
        self._workload = workload
        self._max_staleness = staleness.max
        self._store = Store(
            Rules(
                max_staleness=staleness.max, prompts_per_step=workload.prompts_per_step,
                fresh_per_step=workload.fresh_per_step, every_steps=workload.every_steps,
                slots=workload.slot_limits.at(staleness.batches_ahead), max_uses=workload.max_uses,
                late=workload.late, drain=workload.drain,
            )
        )
        self._store.served(0)
        self._served_version = 0
        self._group_rng, self._train_rng, self._failure_rng = map(np.random.default_rng, ((seed, i) for i in range(3)))
        self._ends: list[tuple[float, int]] = []
        """(end on the work clock, group id) of every group in flight."""
        self._now_s = self._work_s = self._train_s = self._busy_s = 0.0
        self._group_seconds = 0.0
        """The integral of the number of groups in flight over time."""

    def run(self, steps: int) -> Result:
        """Simulate `steps` learner steps, and return the result from the end of the first step on."""
        workload, store = self._workload, self._store
        ages: list[int] = []
        self._admit()
        for version in range(steps):
            while (batch := store.take(version)) is None:
                self._generate(None)
            self._abort()
            self._generate(workload.receive_s)
            ages += (min(version - row.start_version, self._max_staleness) for row in batch)
            train_s = workload.train_s * _factor(workload.train_cv, self._train_rng)
            self._train_s += train_s
            self._generate(train_s)
            store.trained(version + 1)
            if (version + 1) % workload.every_steps == 0:
                self._push(version + 1)
            if version == 0:
                first = self._clocks()
                ages.clear()
        store.state.check_accounting()
        late = store.state.accounting.dropped["late"]
        seconds, train_s, busy_s, group_seconds = (self._clocks() - first).tolist()
        return Result(
            train_s / seconds, float(np.mean(ages)), max(ages), busy_s / seconds,
            group_seconds / seconds / workload.concurrency, seconds / (steps - 1),
            late / (late + store.state.accounting.trained),
        )

    def _clocks(self) -> np.ndarray:
        """Return four totals so far, in seconds: simulated time, training, busy rollout pool, and group seconds."""
        return np.array([self._now_s, self._train_s, self._busy_s, self._group_seconds])

    def _push(self, version: int) -> None:
        while not self._store.may_push():
            self._generate(None)
        self._generate(self._workload.sync_s - self._workload.standstill_s)
        self._now_s += self._workload.standstill_s
        self._group_seconds += len(self._ends) * self._workload.standstill_s
        self._store.served(version)
        self._served_version = version
        self._admit()

    def _generate(self, seconds: float | None) -> None:
        """Let the groups in flight run for `seconds` of simulated time; None: until the next group finishes."""
        left_s = math.inf if seconds is None else seconds
        while self._ends:
            pace = self._workload.group_s(len(self._ends)) / self._workload.group_mean_s
            sampled_s = (self._ends[0][0] - self._work_s) * pace
            passed_s = min(sampled_s, left_s)
            self._now_s += passed_s
            self._busy_s += passed_s
            self._group_seconds += passed_s * len(self._ends)
            left_s -= passed_s
            if sampled_s > passed_s:
                self._work_s += passed_s / pace
                return
            self._work_s, group_id = heapq.heappop(self._ends)
            self._finish(group_id)
            if seconds is None:
                return
        assert seconds is not None, "no group is in flight"
        self._now_s += left_s

    def _finish(self, group_id: int) -> None:
        if self._failure_rng.random() < self._workload.failed:
            self._store.fail(group_id, "", requeue=False)
        else:
            newest = self._served_version
            arrival = Arrival(newest, response_tokens=0.0, reward=0.0, equal_rewards=False, duration_s=0.0)
            self._store.finish(group_id, b"", arrival)
        self._admit()

    def _abort(self) -> None:
        """Stop the groups in flight that the store dropped as late, and start other groups in their slots."""
        if late := set(self._store.aborts(WORKER)):
            self._ends = [(end, group_id) for end, group_id in self._ends if group_id not in late]
            heapq.heapify(self._ends)
            self._store.acknowledge_aborts(WORKER, late)
        self._admit()

    def _admit(self) -> None:
        workload = self._workload
        for slot in self._store.admit(WORKER, workload.concurrency - len(self._ends), self._now_s):
            group_s = workload.group_mean_s * _factor(workload.group_cv, self._group_rng)
            heapq.heappush(self._ends, (self._work_s + group_s, slot.group_id))


def _factor(cv: float, rng: np.random.Generator) -> float:
    """Return a random lognormal factor with mean 1 and coefficient of variation `cv`."""
    sigma = math.sqrt(math.log1p(cv**2))
    return float(rng.lognormal(-(sigma**2) / 2, sigma)) if cv else 1.0
