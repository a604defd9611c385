"""Estimates, tests and intervals against worked examples."""

from __future__ import annotations

import math

import pytest
from scipy import stats

from async_rl.tools.sweeps.statistics import estimate, holm, p_value, ratio_interval, ratio_text


def test_an_estimate_is_mean_and_standard_error() -> None:
    result = estimate([1.0, 2.0, 3.0, 6.0])  # variance 14/3, over 4 values
    assert result.mean == 3.0
    assert result.error == pytest.approx(math.sqrt(14 / 12))
    assert result.text("{:.2f}") == "3.00 ± 1.08"


def test_a_single_seed_has_no_error() -> None:
    assert math.isnan(estimate([2.0]).error)
    assert estimate([2.0]).text("{:+.1f}") == "+2.0"


def test_holm_of_a_worked_example() -> None:
    """The smallest .01 * 4 = .04, then .02 * 3 = .06, .03 * 2 = .06, and .04 * 1, which may not be below .06."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    with_nan = holm([math.nan, 0.02])
    assert math.isnan(with_nan[0]) and with_nan[1] == 0.02


def test_the_p_value_of_a_worked_example() -> None:
    """Means 2 and 5, variances 1 and 4 over 3 values each: t = -3 / sqrt(5/3) = -2.3238, df = (5/3)^2 / (17/18)."""
    expected = 2 * stats.t.sf(3 / math.sqrt(5 / 3), (25 / 9) / (17 / 18))
    assert p_value([1.0, 2.0, 3.0], [3.0, 5.0, 7.0]) == pytest.approx(expected)
    assert p_value([1.0, 1.1, 0.9], [5.0, 5.1, 4.9]) < 0.05
    assert math.isnan(p_value([1.0], [2.0, 3.0]))


def test_the_interval_of_a_ratio_holds_the_ratio_and_shrinks_with_the_spread() -> None:
    low, high = ratio_interval([2.9, 3.0, 3.1], [1.4, 1.5, 1.6])
    assert low < 2.0 < high
    tight_low, tight_high = ratio_interval([2.99, 3.0, 3.01], [1.49, 1.5, 1.51])
    assert low < tight_low < 2.0 < tight_high < high


def test_the_interval_of_a_ratio_satisfies_fieller_s_equation() -> None:
    a, b = [4.0, 5.0, 6.0, 5.5], [2.0, 2.5, 3.0, 2.2]
    top, bottom = estimate(a), estimate(b)
    low, high = ratio_interval(a, b)
    t_squared = [(top.mean - r * bottom.mean) ** 2 / (top.error**2 + (r * bottom.error) ** 2) for r in (low, high)]
    assert t_squared[0] == pytest.approx(t_squared[1])  # both ends lie on the same quantile
    assert 2.4 < math.sqrt(t_squared[0]) < 2.8  # between t(7) = 2.36 and t(3) = 3.18


def test_a_denominator_that_may_be_zero_bounds_nothing() -> None:
    assert ratio_interval([1.0, 2.0, 3.0], [-1.0, 0.1, 1.0]) == (-math.inf, math.inf)
    assert ratio_interval([1.0], [2.0, 2.1]) == (-math.inf, math.inf)
    assert ratio_text([1.0], [2.0]) == "0.50 (not bounded by these seeds)"
    assert ratio_text([1.0, 2.0], [-1.0, 0.5]) == "-"
