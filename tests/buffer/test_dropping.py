"""The gain of `staleness.on_late: drop`, compared with a plain simulation that shares no code with the buffer.

The design's figures are those of a learner that sees who is late when it asks for the next batch. The buffer knows it
one training earlier: once batch v is handed out, a group with deadline v can only miss it. It aborts such a group then,
so that slot and engine go to another one while the learner trains. The plain simulation gives the figure for either
moment: at bound 1 and cv 1 a utilisation of .71 or .76 (and .72 with aborts, but only when the learner asks).
"""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from buffer.simulate import Workload, simulate

pytestmark = pytest.mark.processes  # together they compute for long

SIZE, TRAIN_S, SYNC_S, MEAN_S = 64, 10.0, 0.5, 8.0


def plain(bound: int, steps: int, seed: int, as_designed: bool) -> tuple[float, float]:
    """(utilisation, share dropped).

    As designed: batches are taken in the order groups finish, and a group that is too old when its turn comes is
    dropped then: until that it keeps its slot, and its place at the engine until it finishes. Else as in the buffer:
    the oldest first, and after each hand-out every group that would miss the next one is dropped, running or not.
    """
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

    def drop_late(version: int) -> None:
        nonlocal dropped, queue, running
        before = len(queue) + len(running)
        queue = [start for start in queue if version - start <= bound]
        if not as_designed:
            running = [(end, start) for end, start in running if version - start <= bound]
            heapq.heapify(running)
        dropped += before - len(queue) - len(running)
        admit()

    admit()
    for version in range(steps):
        drop_late(version)
        while len(queue) < SIZE:
            finish()
            drop_late(version)
        if not as_designed:
            queue.sort()
        del queue[:SIZE]
        trained += SIZE
        if not as_designed:
            drop_late(version + 1)
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
    [(0, 0.19, 0.0), (1, 0.71, 0.10), (8, 0.95, 0.07)],
)
def test_utilisation_is_as_designed_or_better_by_what_an_earlier_abort_gains(
    bound: int, utilisation: float, dropped: float
) -> None:
    designed = np.mean([plain(bound, 200, seed, as_designed=True) for seed in range(2)], axis=0)
    assert designed == pytest.approx([utilisation, dropped], abs=0.03)
    expected = np.mean([plain(bound, 200, seed, as_designed=False) for seed in range(2)], axis=0)
    results = [simulate(Workload(late="drop"), bound, 100, seed) for seed in range(2)]
    found = np.mean([(result.utilisation, result.dropped) for result in results], axis=0)
    assert found == pytest.approx(expected, abs=0.03)
    if bound == 1:
        assert expected[0] == pytest.approx(0.76, abs=0.02)
    else:
        assert expected[0] == pytest.approx(utilisation, abs=0.03)
    if bound >= 2:  # oldest first leaves few finished ones to be too old
        assert found[1] < dropped - 0.03
