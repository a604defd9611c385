"""Time-equivalent efficiency: of curves whose e is known, its error, and when it can't be told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.tools.sweeps.efficiency import (
    LARGEST,
    Evaluations,
    SynchronousCurve,
    effective_steps,
    efficiency,
    per_seed,
)
from async_rl.tools.sweeps.statistics import estimate

pytestmark = pytest.mark.processes  # together they compute for long


def run(accuracy: Callable[[float], float], every: int = 30, steps: int = 120) -> Evaluations:
    return [(float(v), accuracy(v)) for v in range(0, steps + 1, every)]


def saturating(v: float) -> float:
    return 0.9 - 0.6 * math.exp(-v / 40)


def s_shaped(v: float) -> float:
    return 0.2 + 0.7 / (1 + math.exp(-(v - 50) / 12))


def late(v: float) -> float:
    return 0.3 + 0.12 * math.log1p(v / 5)


@pytest.mark.parametrize("acc0", [saturating, s_shaped, late])
@pytest.mark.parametrize("e", [0.0, 0.3, 0.5, 0.8, 1.0, 1.2])
def test_runs_that_learn_at_a_known_share_of_the_speed_have_that_efficiency(
    acc0: Callable[[float], float], e: float
) -> None:
    """With five evaluations the curve between them is known to a few hundredths of e, with thirteen to one."""
    for every, tolerance in ((30, 0.03), (10, 0.011)):
        found = efficiency([run(lambda v: acc0(e * v), every)], SynchronousCurve([run(acc0, every)]))
        assert found == pytest.approx(e, abs=tolerance)


def test_equal_gains_are_not_equal_efficiency() -> None:
    """At v = 120 the slow run has 1 - exp(-1.5) = 78 % of all that can be gained, the synchronous one 95 %."""
    slow, fast = run(lambda v: saturating(v / 2), 10), run(saturating, 10)
    gained = (slow[-1][1] - slow[0][1]) / (fast[-1][1] - fast[0][1])
    assert gained == pytest.approx((1 - math.exp(-1.5)) / (1 - math.exp(-3)))
    assert gained > 0.81
    assert efficiency([slow], SynchronousCurve([fast])) == pytest.approx(0.5, abs=0.01)


def test_the_curve_meets_the_means_of_the_seeds_and_never_falls() -> None:
    seeds = [[(0.0, 0.2), (10.0, 0.5), (20.0, 0.45)], [(0.0, 0.4), (12.0, 0.7), (20.0, 0.65)]]
    curve = SynchronousCurve(seeds)
    assert curve([0.0, 11.0, 20.0]) == pytest.approx([0.3, 0.575, 0.575])  # .6 and .55 pool to their mean
    assert (np.diff(curve(np.linspace(0, 60, 200))) >= -1e-12).all()


@pytest.mark.parametrize("skipped", [[30.0], [60.0], [30.0, 60.0]])
def test_an_evaluation_that_one_seed_has_skipped_leaves_the_curve_as_it_is(skipped: list[float]) -> None:
    whole = run(saturating)
    short = [each for each in whole if each[0] not in skipped]
    curve = SynchronousCurve([whole, short, short])
    assert [float(curve(version)) for version, _ in whole] == pytest.approx([accuracy for _, accuracy in whole])
    assert efficiency([whole], curve) == pytest.approx(1.0, abs=0.001)


def test_beyond_its_end_the_curve_goes_on_with_its_last_slope() -> None:
    curve = SynchronousCurve([run(lambda v: 0.2 + 0.004 * v, 10)])
    slope = (float(curve(120.0)) - float(curve(119.9))) / 0.1
    assert curve([130.0, 150.0]) == pytest.approx([curve(120.0) + 10 * slope, curve(120.0) + 30 * slope], abs=1e-4)
    assert slope == pytest.approx(0.004, rel=0.01)


@given(
    tau=st.floats(20, 120), e=st.floats(0.15, 1.0), gain=st.floats(0.1, 0.7), start=st.floats(0.0, 0.3),
    scale=st.floats(0.1, 50),
)  # fmt: skip
def test_efficiency_does_not_depend_on_the_units_of_steps_and_of_accuracy(
    tau: float, e: float, gain: float, start: float, scale: float
) -> None:
    def acc(v: float) -> float:
        return 1 - math.exp(-v / tau)

    plain = efficiency([run(lambda v: acc(e * v), 15)], SynchronousCurve([run(acc, 15)]))
    scaled_runs = [
        [(version * scale, start + gain * accuracy) for version, accuracy in run(of, 15)]
        for of in (lambda v: acc(e * v), acc)
    ]
    scaled = efficiency(scaled_runs[:1], SynchronousCurve(scaled_runs[1:]))
    assert plain == pytest.approx(e, abs=0.02)
    assert scaled == pytest.approx(plain, abs=0.0011)


def test_values_per_seed_have_the_jackknifes_error_of_a_worked_example() -> None:
    """The squared mean of 1, 2, 3 is 4; without one of them 6.25, 4, 2.25, whose squared deviations sum to 8.0417."""
    values = {"a": 1.0, "b": 2.0, "c": 3.0}
    found = per_seed(lambda out: np.array([np.mean([v for s, v in values.items() if s != out]) ** 2]), list(values))
    result = estimate(list(found[:, 0]))
    assert result.mean == pytest.approx(4.0)
    assert result.error == pytest.approx(math.sqrt(2 / 3 * 8.0417), rel=1e-5)


def noisy(rng: np.random.Generator, e: float, shared: Sequence[float]) -> dict[str, Evaluations]:
    return {
        str(seed): [(v, a + offset + rng.normal(0, 0.02)) for v, a in run(lambda v: saturating(e * v))]
        for seed, offset in enumerate(shared)
    }


@pytest.mark.parametrize("of_a_seed", [0.0, 0.015])
def test_the_error_is_the_spread_that_repeated_sweeps_have(of_a_seed: float) -> None:
    """A seed shares things with itself, such as held-out prompts, on both sides: they must not be counted twice."""
    rng = np.random.default_rng(3)
    means, errors = [], []
    for _ in range(150):
        shared = rng.normal(0, of_a_seed, 5)
        synchronous, stale = noisy(rng, 1.0, shared), noisy(rng, 0.6, shared)
        found = effective_steps(stale, dict.fromkeys(stale, 100.0), list(synchronous.items()))
        result = estimate(list(found[:, 0]))
        means.append(result.mean)
        errors.append(result.error)
        assert found[:, 1] == pytest.approx(100 * found[:, 0])
    assert np.mean(means) == pytest.approx(0.6, abs=0.015)
    assert math.sqrt(np.mean(np.square(errors))) == pytest.approx(np.std(means), rel=0.25)


@pytest.mark.parametrize(("stale", "synchronous"), [("01234", "56789"), ("01", "012345"), ("012345", "67")])
def test_the_error_has_the_synchronous_part_where_seeds_differ(stale: str, synchronous: str) -> None:
    """At most a third too large, where the synchronous runs are much fewer: their two seeds are divided by six."""
    rng = np.random.default_rng(1)
    means, errors = [], []
    for _ in range(120):
        base, runs = (
            dict(zip(seeds, noisy(rng, e, rng.normal(0, 0.015, len(seeds))).values(), strict=True))
            for seeds, e in ((synchronous, 1.0), (stale, 0.6))
        )
        found = estimate(list(effective_steps(runs, dict.fromkeys(runs, 1.0), list(base.items()))[:, 0]))
        means.append(found.mean)
        errors.append(found.error)
    assert 0.9 < math.sqrt(np.mean(np.square(errors))) / np.std(means) < 1.35


def test_effective_steps_are_synchronous_steps_that_teach_as_much() -> None:
    runs = {seed: run(lambda v: saturating(0.5 * v), 10) for seed in ("0", "1")}
    found = effective_steps(runs, {"0": 90.0, "1": 110.0}, [("0", run(saturating, 10)), ("1", run(saturating, 10))])
    assert found[:, 0] == pytest.approx([0.5, 0.5], abs=0.01)
    assert found[:, 1].mean() == pytest.approx(50.0, rel=0.02)
    assert found[1, 1] - found[0, 1] == pytest.approx(10.0, rel=0.02)  # the spread of the speeds


def test_runs_above_all_of_the_curve_or_without_evaluations_have_no_efficiency() -> None:
    curve = SynchronousCurve([run(saturating)])
    assert math.isnan(efficiency([[(0.0, 0.3)]], curve))
    assert math.isnan(efficiency([[(0.0, 0.3), (30.0, 2.0), (60.0, 2.0)]], curve))
    assert efficiency([[(0.0, 0.3), (30.0, 0.1), (60.0, 0.1)]], curve) == 0.0
    assert LARGEST > 1.0


@pytest.mark.parametrize("e", [2.0, 2.5, 4.0])
def test_runs_that_reach_the_level_where_the_curve_is_flat_have_no_efficiency(e: float) -> None:
    curve = SynchronousCurve([[(0.0, 0.1), (10.0, 0.42), (20.0, 0.5), (30.0, 0.5), (40.0, 0.5)]])
    fast = [(v, float(curve(e * v))) for v in (0.0, 10.0, 20.0, 30.0, 40.0)]
    assert math.isnan(efficiency([fast], curve))
    slow = [(v, float(curve(1.5 * v))) for v in (0.0, 10.0, 20.0, 30.0, 40.0)]
    assert efficiency([slow], curve) == pytest.approx(1.5, abs=0.01)
