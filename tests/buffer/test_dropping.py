"""What `staleness.late: drop` gains, against a plain simulation of the rule behind the design's figures."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from benchmarks.simulate import Workload, simulate

SIZE, TRAIN_S, SYNC_S, MEAN_S = 64, 10.0, 0.5, 8.0


def consumed_in_order(bound: int, steps: int, seed: int) -> tuple[float, float]:
    """(utilisation, share dropped) when batches are taken in the order groups finish, and a group that is too old when
    its turn comes is dropped then: until that it keeps its slot, and its place at the engine until it finishes."""
    rng = np.random.default_rng(seed)
    sigma = float(np.sqrt(np.log(2.0)))  # cv 1
    now = 0.0
    served = trained = dropped = 0
    running: list[tuple[float, int]] = []  # (end, start version)
    queue: list[int] = []  # start versions

    def admit() -> None:
        while len(running) < SIZE and len(running) + len(queue) + trained < (bound + served + 1) * SIZE:
            heapq.heappush(running, (now + MEAN_S * rng.lognormal(-(sigma**2) / 2, sigma), served))

    def finish() -> None:
        nonlocal now
        now, start = heapq.heappop(running)
        queue.append(start)
        admit()

    admit()
    for version in range(steps):
        while True:
            young = [start for start in queue if version - start <= bound]
            dropped += len(queue) - len(young)
            queue = young
            admit()
            if len(queue) >= SIZE:
                break
            finish()
        del queue[:SIZE]
        trained += SIZE
        end = now + TRAIN_S
        while running and running[0][0] <= end:
            finish()
        now = end + SYNC_S
        running = [(end_s + SYNC_S, start) for end_s, start in running]
        served = version + 1
        admit()
    return steps * TRAIN_S / now, dropped / (dropped + trained)


@pytest.mark.parametrize(
    ("bound", "utilisation", "dropped"),
    [(0, 0.19, 0.0), (1, 0.71, 0.10), (2, 0.95, 0.12), (4, 0.95, 0.10), (8, 0.95, 0.07)],
)
def test_the_designs_figures_are_met_and_fewer_groups_dropped_at_high_bounds(
    bound: int, utilisation: float, dropped: float
) -> None:
    plain = np.mean([consumed_in_order(bound, 200, seed) for seed in range(2)], axis=0)
    assert plain == pytest.approx([utilisation, dropped], abs=0.03)
    results = [simulate(Workload(late="drop"), bound, 100, seed) for seed in range(2)]
    ours = float(np.mean([result.utilisation for result in results]))
    assert ours >= utilisation - 0.03
    if bound == 1:  # what will miss its deadline gives its slot back at once: .76
        assert ours > utilisation + 0.03
    else:
        assert ours == pytest.approx(utilisation, abs=0.03)
    if bound >= 2:  # earliest deadline first leaves few finished ones to be too old
        assert np.mean([result.dropped for result in results]) < dropped - 0.03
