"""The reward of each policy version, by version and by time: a run's learning curve without the lag of its batches.

Batch v shows the reward of the policies that sampled it, which are older than v by their staleness. Here the answers of
batch v that are s versions old count for version v - s, which is served from the end of step v - s on:

    reward(n) = sum_v episodes(v, v - n) reward(v, v - n) / sum_v episodes(v, v - n)

An answer that several versions sampled counts for the oldest of them. The last versions, as many as the largest
staleness, are left out: only their fastest groups have arrived, whose rewards are not typical.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from async_rl.base.telemetry.metrics import seconds_at

Step = Mapping[str, float | None]
LAST_BUCKET = 10
"""`by_staleness/10/reward` is the mean reward of all answers with this staleness or more."""


@dataclass(frozen=True, slots=True)
class PolicyPoint:
    """The mean reward of the answers sampled by one version."""

    version: int
    served_s: float
    """When the version was first served, in seconds since the end of the first step. Version 0, the initial
    model, is served before that."""
    reward: float
    episodes: float


def evaluations_of(curve: Sequence[PolicyPoint]) -> list[tuple[float, float]]:
    """Return (version, reward) for spans of versions, for efficiency.py: 0, 1, 2, 3, 4 to 5, 6 to 8, 9 to 12 ...

    A span is about half as long as its first version, so slow and fast curves are described equally well.
    """
    means = []
    for _, found in groupby(curve, key=lambda point: _span(point.version)):
        points = list(found)
        episodes = math.fsum(point.episodes for point in points)
        version = math.fsum(point.episodes * point.version for point in points) / episodes
        means.append((version, math.fsum(point.episodes * point.reward for point in points) / episodes))
    return means


def policy_curve(steps: Sequence[Step]) -> tuple[PolicyPoint, ...]:
    """Return a run's learning curve: the mean reward of each version, as far as known, in ascending order.

    Args:
        steps: the records of the run's steps in metrics.jsonl, in order.
    """
    if not steps:
        return ()
    credited: dict[int, list[tuple[float, float]]] = {}
    oldest = 0
    for step in steps:
        for staleness, episodes, reward in _by_staleness(step):
            credited.setdefault(int(step["step"] or 0) - 1 - staleness, []).append((episodes, reward))
            oldest = max(oldest, staleness)
    served_s = {0: -(steps[0].get("time/step_s") or 0.0)}
    served_s |= {int(step["step"] or 0): seconds for step, seconds in zip(steps, seconds_at(steps), strict=True)}
    end = max(served_s) - oldest
    points = []
    for version in sorted(credited.keys() & served_s.keys()):
        if version < end:
            episodes = math.fsum(count for count, _ in credited[version])
            reward = math.fsum(count * mean for count, mean in credited[version]) / episodes
            points.append(PolicyPoint(version, served_s[version], reward, episodes))
    return tuple(points)


def _by_staleness(step: Step) -> Iterator[tuple[int, float, float]]:
    """Yield (staleness, number of answers, their mean reward) for a batch.

    For answers of staleness LAST_BUCKET and more only their common mean reward is known; it is used for each of them.
    """
    for key, episodes in step.items():
        if (found := re.fullmatch(r"staleness/episodes_(\d+)", key)) and episodes:
            staleness = int(found[1])
            reward = step.get(f"by_staleness/{min(staleness, LAST_BUCKET)}/reward")
            if reward is not None:
                yield staleness, episodes, reward


def _span(version: int) -> int:
    """Return the first version of the span that contains `version`."""
    first = 0
    while version >= (following := first + max(1, first // 2)):
        first = following
    return first
