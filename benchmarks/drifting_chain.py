"""The environment `chain` with look-ups that get longer while a run goes on: what is the best depth changes with them.

    async-rl sweep configs/sweep_agent_cpu.yaml --staleness 1,2,4,8,1.25/8,2/8,auto/8 --seconds 150
        task.env=benchmarks.drifting_chain:DriftingChain task.params.end_s=0.6 task.params.over_s=100
"""

from __future__ import annotations

import time

from rollout_server.episodes.environments.chain import Chain


def drifted_s(mean_s: float, end_s: float, over_s: float, since_s: float) -> float:
    """Return the mean time of a look-up `since_s` seconds after the first: it grows evenly until `over_s`, then stays.
    """
    return mean_s + (end_s - mean_s) * min(1.0, since_s / over_s)


class DriftingChain(Chain):
    """One episode of `chain`; look-ups take `mean_s` in the mean when its process begins, and `end_s` after `over_s`.

    Args:
        index, seed, mean_s, cv: as in `Chain`.
        end_s: the mean time of a look-up, in seconds, at the end of the change.
        over_s: the change takes so many seconds from the first episode of the process on.
    """

    _first_s: float | None = None

    def __init__(
        self, index: int, seed: int = 0, mean_s: float = 0.1, cv: float = 1.5, end_s: float = 0.6, over_s: float = 100.0
    ) -> None:
        if DriftingChain._first_s is None:
            DriftingChain._first_s = time.monotonic()
        now_s = drifted_s(mean_s, end_s, over_s, time.monotonic() - DriftingChain._first_s)
        super().__init__(index, seed, now_s, cv)
