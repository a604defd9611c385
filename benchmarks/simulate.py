"""Learner utilisation against `staleness.max`, by discrete events through the buffer's own state machine.

    python -m benchmarks.simulate --staleness 0,1,2,4,8 --cv 1.0

Rollout groups take lognormal times; the learner takes `train_s` a batch, then `sync_s` to push, while generation
pauses in place. Nothing but time is simulated: admission, hand-out and release are buffer.store's.
"""

from __future__ import annotations

import argparse
import heapq
from dataclasses import dataclass

import numpy as np

from buffer.store import Store


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Durations in seconds of simulated time."""

    concurrency: int = 64
    """Rollout groups in flight at most."""
    prompts_per_step: int = 64
    train_s: float = 10.0
    sync_s: float = 0.5
    group_mean_s: float = 8.0
    group_cv: float = 1.0
    """Standard deviation of a group's duration over its mean."""
    every_steps: int = 1


@dataclass(frozen=True)
class Result:
    utilisation: float
    """Share of time the learner trains."""
    mean_staleness: float
    """Versions between the start of a group and the batch that holds it."""
    max_staleness: int


def simulate(workload: Workload, max_staleness: int, steps: int, seed: int = 0) -> Result:
    """`steps` learner steps from an empty buffer."""
    return _Simulation(workload, max_staleness, seed).run(steps)


class _Simulation:
    def __init__(self, workload: Workload, max_staleness: int, seed: int) -> None:
        self._workload = workload
        self._store = Store(max_staleness, workload.prompts_per_step)
        self._store.served(0)
        self._rng = np.random.default_rng(seed)
        self._sigma = float(np.sqrt(np.log1p(workload.group_cv**2)))
        self._now_s = 0.0
        self._ends: list[tuple[float, int]] = []  # (time, group id) of every running group
        self._ages: list[int] = []

    def run(self, steps: int) -> Result:
        workload, store = self._workload, self._store
        self._admit()
        for version in range(steps):
            while (batch := store.take(version)) is None:
                self._finish_next()
            self._ages += [version - group.slot.start_version for group in batch.groups]
            self._advance(workload.train_s)
            store.trained(version + 1)
            if (version + 1) % workload.every_steps == 0:
                self._pause(workload.sync_s)
                store.served(version + 1)
                self._admit()
        store.check_identity()
        return Result(steps * workload.train_s / self._now_s, float(np.mean(self._ages)), max(self._ages))

    def _advance(self, seconds: float) -> None:
        end_s = self._now_s + seconds
        while self._ends and self._ends[0][0] <= end_s:
            self._finish_next()
        self._now_s = end_s

    def _pause(self, seconds: float) -> None:
        """In place: everything that runs continues so much later."""
        self._now_s += seconds
        self._ends = [(end_s + seconds, group_id) for end_s, group_id in self._ends]  # still a heap

    def _finish_next(self) -> None:
        self._now_s, group_id = heapq.heappop(self._ends)
        self._store.finish(group_id, b"")
        self._admit()

    def _admit(self) -> None:
        """As the worker does: as many as there are slots and places at the engine."""
        mean = np.log(self._workload.group_mean_s) - self._sigma**2 / 2
        for slot in self._store.admit("rollout/0", self._workload.concurrency - len(self._ends), self._now_s):
            duration_s = float(self._rng.lognormal(mean, self._sigma))
            heapq.heappush(self._ends, (self._now_s + duration_s, slot.group_id))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", default="0,1,2,4,8", help="values of staleness.max, comma-separated")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    default = Workload()
    parser.add_argument("--concurrency", type=int, default=default.concurrency)
    parser.add_argument("--prompts-per-step", type=int, default=default.prompts_per_step)
    parser.add_argument("--train-s", type=float, default=default.train_s)
    parser.add_argument("--sync-s", type=float, default=default.sync_s)
    parser.add_argument("--group-mean-s", type=float, default=default.group_mean_s)
    parser.add_argument("--cv", dest="group_cv", type=float, default=default.group_cv)
    parser.add_argument("--every-steps", type=int, default=default.every_steps)
    options = vars(parser.parse_args())
    bounds, steps, seed = options.pop("staleness"), options.pop("steps"), options.pop("seed")
    workload = Workload(**options)
    print("staleness.max  utilisation/learner  staleness/mean  staleness/max")
    for bound in map(int, bounds.split(",")):
        result = simulate(workload, bound, steps, seed)
        print(f"{bound:13}  {result.utilisation:19.3f}  {result.mean_staleness:14.2f}  {result.max_staleness:13}")


if __name__ == "__main__":
    main()
