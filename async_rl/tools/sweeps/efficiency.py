"""The efficiency e of training with stale data: how many synchronous steps one of its steps is worth.

A learning curve is concave: a run that learns at half the speed ends far above half of the gain, so gains per step
overrate it. The efficiency compares at equal accuracy instead. It is the number e for which

    accuracy(v) = acc0(e v)

where accuracy(v) is the held-out accuracy after v steps and acc0 the accuracy of synchronous training (staleness.max
0) with the same other settings. Steps per minute times e are effective steps per minute.

- acc0: the evaluations of the synchronous runs are averaged over seeds, version by version, made monotone by isotonic
  regression, and interpolated by a monotone cubic (PCHIP) over log(1 + v / v1), v1 the first version after the start.
  Between few evaluations of a concave curve an interpolation over v itself is too low, and e would be too large.
  Beyond the last evaluation the curve continues with its last slope.
- e: least squares over all evaluations after the start of all seeds of a setting together.
- Its error: the delete-one jackknife over seeds. A seed is left out of the setting and of the synchronous runs
  together, so the error includes the synchronous curve's. A synchronous run whose seed the setting lacks is left out
  with another seed of the setting.
- If held-out accuracy does not determine e, the rewards of the policies may (policy_curve.py), up to the last version
  of the runs at the lowest staleness: rewards of single batches are too noisy for a slope beyond them.

Sources: Fritsch and Carlson 1980, "Monotone piecewise cubic interpolation"; Efron and Stein 1981, "The jackknife
estimate of variance".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from async_rl.tools.sweeps.statistics import estimate

Evaluations = Sequence[tuple[float, float]]
"""(version, held-out accuracy) of every evaluation of a run, in ascending order; version 0 is the start. Or (version,
sampled reward) for spans of versions."""
LARGEST = 3.0
"""The largest efficiency that is tried."""
MIN_EVALUATIONS = 3
SATURATED = 0.9
"""Beyond this share of the whole gain of synchronous training, the curve is too flat to derive steps from accuracy."""


class SynchronousCurve:
    """acc0: the held-out accuracy of synchronous training as a function of the number of steps, from one or more seeds.
    """

    def __init__(self, runs: Sequence[Evaluations]) -> None:
        from scipy.interpolate import PchipInterpolator  # here, as these imports take a second and few commands need it
        from scipy.optimize import isotonic_regression

        versions, means, weights = _averaged(runs)
        values = isotonic_regression(means, weights=weights).x
        self._scale, self.end = float(versions[1]), float(versions[-1])
        self._interpolated = PchipInterpolator(self._warp(versions), values)
        slope = float(self._interpolated(self._warp(self.end), 1))
        self._end_slope = slope / (self._scale + self.end)  # the derivative of _warp at the end

    def __call__(self, steps: ArrayLike) -> NDArray[np.float64]:
        """Return acc0 after `steps` steps, an array of any shape."""
        steps = np.asarray(steps, dtype=float)
        inside: NDArray[np.float64] = self._interpolated(self._warp(np.minimum(steps, self.end)))
        return inside + self._end_slope * np.maximum(steps - self.end, 0.0)

    def _warp(self, versions: Any) -> Any:
        return np.log1p(versions / self._scale)


def _averaged(runs: Sequence[Evaluations]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Average the evaluations of several runs. Returns versions, accuracies and, for each, the number of runs.

    Evaluations with equal versions are averaged. If versions differ between runs, because weights changed while answers
    were sampled, the k-th evaluations are averaged.
    """
    found: dict[float, list[tuple[float, int]]] = {}
    longest = max(map(len, runs))
    due = sorted({version for run in runs for version, _ in run})
    for k in range(longest):
        at_k = [run[k] for run in runs if len(run) > k]
        have = [each for run in runs for each in run if each[0] == due[k]] if len(due) == longest else at_k
        version, accuracy = np.mean(have, axis=0)
        found.setdefault(float(version), []).append((float(accuracy), len(have)))
    versions = sorted(found)
    means = [np.average([a for a, _ in found[v]], weights=[n for _, n in found[v]]) for v in versions]
    return np.array(versions), np.array(means), np.array([float(sum(n for _, n in found[v])) for v in versions])


def why_unknown(synchronous: Sequence[Evaluations], what: str = "accuracy") -> str:
    """Return why no efficiency can be computed from these synchronous runs, as the end of a sentence; "" if it can.

    Args:
        what: accuracy, or reward: the evaluations are then of the runs at the lowest staleness.
    """
    if not synchronous:
        return "the sweep has no synchronous setting (staleness.max 0) to compare with"
    few = min(len({version for version, _ in run}) for run in synchronous)
    if few < MIN_EVALUATIONS:
        return (
            f"a run to compare with has {few} points of {what}, and a curve needs {MIN_EVALUATIONS}: at the start, on "
            "the way and at the end (eval.every_steps)"
        )
    if not (begun := [run for run in synchronous if run[0][0] == 0]):
        return f"no run to compare with has the {what} of its start, version 0"
    gained = estimate([run[-1][1] - run[0][1] for run in begun])
    if not gained.mean > 2 * (0.0 if math.isnan(gained.error) else gained.error):
        return f"the runs to compare with gained no {what} that their seeds agree on ({gained.text('{:+.3f}')})"
    versions, means, _ = _averaged(synchronous)
    share = (means[1] - means[0]) / (means.max() - means[0])
    if share > SATURATED:
        return (
            f"at their first point, version {versions[1]:.0f}, the runs to compare with had made {share:.0%} of their "
            f"way, so {what} does not tell how many steps it took (eval.every_steps)"
        )
    return ""


def efficiency(runs: Sequence[Evaluations], curve: SynchronousCurve, until: float = math.inf) -> float:
    """Return the e in 0..LARGEST for which curve(e v) fits the evaluations of `runs` after the start best.

    The result is nan if there are none, or if larger e fit as well: the runs are above the whole curve, or have reached
    a level where it is flat.

    Args:
        until: the last version whose evaluations count.
    """
    points = [(version, accuracy) for run in runs for version, accuracy in run if 0 < version <= until]
    if not points:
        return math.nan
    versions, accuracies = np.array(points).T

    def errors(candidates: NDArray[np.float64]) -> NDArray[np.float64]:
        squares: NDArray[np.float64] = (curve(candidates[:, None] * versions) - accuracies) ** 2
        return squares.sum(axis=1)

    coarse = np.linspace(0.0, LARGEST, 121)
    found = errors(coarse)
    if found[-1] <= found.min() + 1e-12:
        return math.nan
    fine = np.clip(coarse[found.argmin()] + np.linspace(-0.025, 0.025, 101), 0.0, LARGEST)
    return float(fine[errors(fine).argmin()])


def per_seed(statistic: Callable[[str | None], NDArray[np.float64]], seeds: Sequence[str]) -> NDArray[np.float64]:
    """Return [seeds, numbers]: one value per seed (jackknife pseudo-values) whose mean is `statistic(None)`.

    The delete-one jackknife gives their standard error, so they can be used as if each seed had been measured
    separately. For a statistic that is a mean, they are the seeds' own values.

    Args:
        statistic: returns its numbers without the given seed, or with all seeds if it is None.
    """
    whole = statistic(None)
    if len(seeds) == 1:
        return whole[None]
    without = np.stack([statistic(seed) for seed in seeds])
    return whole + (len(seeds) - 1) * (without.mean(axis=0) - without)


def effective_steps(
    runs: Mapping[str, Evaluations],
    steps_per_minute: Mapping[str, float],
    synchronous: Sequence[tuple[str, Evaluations]],
    within: bool = False,
) -> NDArray[np.float64]:
    """Return [seeds, 2]: the efficiency and the effective steps per minute of a setting, per seed as in `per_seed`.

    Args:
        runs: the evaluations of the setting by seed.
        steps_per_minute: by seed.
        synchronous: (seed, evaluations) of each synchronous run, for which `why_unknown` has returned "". They must
            have several seeds if the setting has.
        within: only versions up to the last one of the synchronous curve count.
    """

    shared = {seed for seed, _ in synchronous} & runs.keys()
    partners = cycle(sorted(runs, key=shared.__contains__))  # seeds without a synchronous run come first
    partner = {seed: seed if seed in shared else next(partners) for seed in dict(synchronous)}

    def statistic(without: str | None) -> NDArray[np.float64]:
        base = [run for seed, run in synchronous if partner[seed] != without]
        kept = [seed for seed in runs if seed != without]
        curve = SynchronousCurve(base)
        e = efficiency([runs[seed] for seed in kept], curve, curve.end if within else math.inf)
        return np.array([e, e * float(np.mean([steps_per_minute[seed] for seed in kept]))])

    return per_seed(statistic, list(runs))
