"""Simulates the utilisation of learner and rollout pool for values of `staleness.max`, event by event.

Rollout groups take lognormal times, or those of measured groups of episodes; they take longer the more of them sample
at a time. The learner takes `train_s` for a batch, then `sync_s` for a push, in which generation pauses for
`pause_s`. Only durations are simulated: admission, hand-out, release, what happens to late groups and, with `drain`,
the wait before a push are done by buffer.store. With `late: drop` a group is therefore aborted at the hand-out after
which it can only miss its deadline, and its prompt is granted again.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from async_rl.config.check import check
from benchmarks.simulated_rollout import EpisodeTimes, GroupTimes, RolloutPool, RunningGroup
from buffer.staleness import Rules
from buffer.store import Store
from buffer.store_rows import Outcome, Row
from buffer.store_state import StoreState

Policy = Literal["wait", "drop", "mask"]
WORKER = "rollout/0"


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The settings and durations of a simulated run. Durations are in seconds of simulated time."""

    concurrency: int = 64
    """The largest number of rollout groups in flight."""
    prompts_per_step: int = 64
    train_s: float = 10.0
    train_cv: float = 0.0
    train_times: tuple[float, ...] = ()
    """The measured times of training of the batches from number 1 on, which are replayed, scaled to the mean `train_s`.
    Empty: times of training are lognormal."""
    sync_s: float = 0.5
    pause_s: float | None = None
    """How long generation pauses in a push, at most sync_s; None: all of sync_s."""
    receive_s: float = 0.0
    """How long the learner takes to receive a batch that is ready."""
    group_mean_s: float = 8.0
    """The mean duration of a group that runs alone; with `groups` the mean time that an episode of it is sampled."""
    group_cv: float = 1.0
    """The standard deviation of a group's duration over its mean. Not used with `groups`."""
    load_s: float = 0.0
    """The time that each further group that samples adds to group_mean_s. 0: the engine has room. group_mean_s: the
    engine is full, and its throughput no longer grows."""
    groups: tuple[GroupTimes, ...] = ()
    """Measured groups of episodes of several turns, in order, which are replayed with their sampling scaled to the mean
    `group_mean_s`: prompt i is number i, also when it is granted again, and after the last comes the first. Empty:
    groups are sampled at one go and have lognormal durations."""
    failed: float = 0.0
    """The share of groups that are dropped when they finish, for a failed reward or zero variance."""
    every_steps: int = 1
    late: Policy = "wait"
    max_uses: int = 1
    fresh_fraction: float = 1.0
    drain: bool = False
    """As weight_sync.on_update=drain: a push waits for the groups in flight, and no group starts meanwhile."""
    holds_turns: bool = False
    """With drain: a push waits only until no episode samples, and no turn begins meanwhile."""

    @property
    def standstill_s(self) -> float:
        return self.sync_s if self.pause_s is None else min(self.pause_s, self.sync_s)

    @property
    def fresh_per_step(self) -> int:
        return math.ceil(self.fresh_fraction * self.prompts_per_step)

    @property
    def smallest_bound(self) -> int:
        """The smallest staleness.max with which the learner does not wait for ever; configs with less are refused."""
        between_pushes = math.ceil(self.every_steps * self.prompts_per_step / self.fresh_per_step) - 1
        return max(between_pushes, int(self.max_uses > 1))

    def group_s(self, sampling: float) -> float:
        """Return the mean duration of a group while `sampling` groups sample, that group included."""
        return self.group_mean_s + self.load_s * max(0.0, sampling - 1)


@dataclass(frozen=True)
class Result:
    utilisation: float
    """The share of time in which the learner trains."""
    mean_staleness: float
    """The mean over trained groups of the batch's version minus that of the oldest trained token: its start version, or
    with staleness.late=mask the oldest version that is not masked."""
    max_staleness: int
    rollout: float
    """The share of time in which at least one group is in flight and no push pauses it."""
    in_flight: float
    """The mean over time of groups in flight over `concurrency`; the metric occupancy/rollout counts requests."""
    step_s: float
    dropped: float
    """The number of late groups over that of late and trained groups."""
    dropped_length: float = 1.0
    """The mean length of late groups over that of late and trained groups, by the time of sampling; 1: none is late."""
    dropped_duration: float = 1.0
    """The mean duration of late groups, if they ran alone, over that of late and trained groups; 1: none is late."""
    masked: float = 0.0
    """The share of the time of sampling, and so about of the tokens, that is masked in trained groups."""


def mean_result(results: Sequence[Result]) -> Result:
    """Return the means of all values, but of max_staleness the maximum."""
    names = [field.name for field in fields(Result)]
    means: dict[str, Any] = {name: statistics.fmean(getattr(result, name) for result in results) for name in names}
    return Result(**{**means, "max_staleness": max(result.max_staleness for result in results)})


def simulate(workload: Workload, max_staleness: int, steps: int, seed: int = 0) -> Result:
    """Simulate `steps` >= 2 learner steps from an empty buffer, and return the utilisation, staleness and times.

    As in measured runs, times and utilisation are those from the end of the first step.

    Raises:
        ConfigError: `max_staleness` is below workload.smallest_bound, so that the learner would wait for ever.
    """
    check(
        max_staleness >= workload.smallest_bound, "staleness.max", max_staleness,
        f"at least {workload.smallest_bound} with {workload.prompts_per_step} groups a step, "
        f"{workload.fresh_per_step} of them fresh, and weight_sync.every_steps {workload.every_steps}",
    )
    return _Simulation(workload, max_staleness, seed).run(steps)


class _Simulation:
    """One simulation and its state."""

    def __init__(self, workload: Workload, max_staleness: int, seed: int) -> None:
        self._workload = workload
        self._max_staleness = max_staleness
        self._store = Store(
            Rules(
                max_staleness=max_staleness, prompts_per_step=workload.prompts_per_step,
                fresh_per_step=workload.fresh_per_step, max_uses=workload.max_uses, late=workload.late,
                drain=workload.drain, holds_turns=workload.holds_turns,
            ),
            StoreState(self._record),
        )
        self._store.served(0)
        self._rng = np.random.default_rng(seed)
        self._pool = RolloutPool(lambda load: workload.group_s(load) / workload.group_mean_s, self._finish)
        self._measured = _scaled(workload)
        self._groups: dict[int, RunningGroup] = {}
        """The groups that are not dropped, nor trained for the last time."""
        self._served: list[tuple[int, float]] = [(0, 0.0)]
        """(version, the pool's work clock when it was served)."""
        self._train_s = 0.0
        self._ages: list[int] = []
        self._masked_s, self._trained_s = 0.0, 0.0
        """The time of sampling that was masked, and that of all trained groups."""
        self._sizes: dict[str, list[tuple[float, float]]] = {"trained": [], "late": []}
        """(time of sampling, duration) of the groups of each outcome, as if each ran alone."""

    def run(self, steps: int) -> Result:
        workload, store, pool = self._workload, self._store, self._pool
        begun = np.zeros(4)
        self._admit()
        for version in range(steps):
            while (batch := store.take(version)) is None:
                pool.advance(None)
            self._abort()
            pool.advance(workload.receive_s)
            self._measure(batch, version)
            train_s = self._training_s(version)
            self._train_s += train_s
            pool.advance(train_s)
            store.trained(version + 1)
            if (version + 1) % workload.every_steps == 0:
                self._push(version + 1)
            if version == 0:
                begun = self._clocks()
        store.state.check_accounting()
        late = store.state.accounting.dropped["late"]
        length, duration = _bias(self._sizes["late"], self._sizes["trained"])
        seconds, train_s, busy_s, group_seconds = (self._clocks() - begun).tolist()
        return Result(
            train_s / seconds, float(np.mean(self._ages)), max(self._ages), busy_s / seconds,
            group_seconds / seconds / workload.concurrency, seconds / (steps - 1),
            late / (late + store.state.accounting.trained), length, duration, self._masked_s / self._trained_s,
        )

    def _clocks(self) -> npt.NDArray[np.float64]:
        """Return the time since the begin, and the totals over it of training, busy rollout pool and group seconds."""
        return np.array([self._pool.now_s, self._train_s, self._pool.busy_s, self._pool.group_seconds])

    def _push(self, version: int) -> None:
        workload, store, pool = self._workload, self._store, self._pool
        pool.holds_turns = workload.drain and workload.holds_turns
        while not store.may_push({WORKER} if pool.holds_turns and not pool.is_sampling else frozenset()):
            pool.advance(None)
        pool.advance(workload.sync_s - workload.standstill_s)
        pool.advance(workload.standstill_s, is_paused=True)
        store.served(version)
        self._served.append((version, pool.work_s))
        pool.release_turns()
        self._admit()

    def _finish(self, running: RunningGroup) -> None:
        if self._rng.random() < self._workload.failed:
            self._store.fail(running.group_id, "", requeue=False)
        else:
            newest = self._served[bisect_left(self._served, running.sampled_until, key=lambda served: served[1]) - 1]
            outcome = Outcome(newest[0], response_tokens=0.0, reward=0.0, equal_rewards=False, duration_s=0.0)
            self._store.finish(running.group_id, b"", outcome)
        self._admit()

    def _abort(self) -> None:
        """Stop the groups that the store dropped as late at a batch's hand-out, and start others in their slots."""
        if late := self._store.aborts(WORKER):
            self._pool.stop(late)
            self._store.acknowledge_aborts(WORKER, late)
        self._admit()

    def _admit(self) -> None:
        for slot in self._store.admit(WORKER, self._workload.concurrency - self._pool.num_groups, self._pool.now_s):
            self._groups[slot.group_id] = self._pool.start(slot.group_id, self._times(slot.prompt_index))

    def _times(self, prompt_index: int) -> GroupTimes:
        if self._measured:
            return self._measured[prompt_index % len(self._measured)]
        duration_s = self._workload.group_mean_s * self._factor(self._workload.group_cv)
        return GroupTimes((EpisodeTimes(1, duration_s, 0.0),))

    def _training_s(self, version: int) -> float:
        times = self._workload.train_times
        if times:
            return self._workload.train_s * times[(version - 1) % len(times)] / statistics.fmean(times)
        return self._workload.train_s * self._factor(self._workload.train_cv)

    def _factor(self, cv: float) -> float:
        """Return a random lognormal factor with mean 1 and coefficient of variation `cv`."""
        sigma = float(np.sqrt(np.log1p(cv**2)))
        return float(self._rng.lognormal(-(sigma**2) / 2, sigma)) if cv else 1.0

    def _measure(self, batch: list[Row], version: int) -> None:
        """Add the staleness, the masked share and the sizes of the groups of a batch to the totals."""
        oldest = version - self._max_staleness  # the oldest version whose tokens are trained
        masked_until = self._served[bisect_left(self._served, oldest, key=lambda served: served[0])][1]
        for row in batch:
            group = self._groups[row.group_id]
            self._ages.append(min(version - row.start_version, self._max_staleness))
            self._trained_s += group.times.generate_s
            self._masked_s += sum(max(0.0, min(end, masked_until) - begin) for begin, end in group.sampled)
            if row.is_fresh:
                self._sizes["trained"].append((group.times.generate_s, group.times.duration_s))

    def _record(self, row: Row) -> None:
        """Take note of each change of a group's state: forget it when that is final, but for the size of a late one."""
        if row.state in ("trained", "dropped"):
            times = self._groups.pop(row.group_id).times
            if row.drop_reason == "late":
                self._sizes["late"].append((times.generate_s, times.duration_s))


def _scaled(workload: Workload) -> list[GroupTimes]:
    """Return the workload's measured groups, with their sampling scaled to the mean `group_mean_s` of an episode."""
    num_episodes = sum(len(group.episodes) for group in workload.groups)
    sampled_s = sum(group.generate_s for group in workload.groups)
    return [group.scaled(workload.group_mean_s * num_episodes / sampled_s) for group in workload.groups]


def _bias(late: list[tuple[float, float]], trained: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the mean of both sizes of late groups over that of all groups; ones if no group is late."""
    if not late:
        return 1.0, 1.0
    length, duration = np.mean(late, axis=0) / np.mean([*late, *trained], axis=0)
    return float(length), float(duration)
