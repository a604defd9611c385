"""Means over seeds with their uncertainty. Student's t throughout: seeds are few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95
SIGNIFICANT = 1 - CONFIDENCE
"""Largest p-value of a difference that is called one."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds. `error` is its standard error, nan for a single seed."""

    mean: float
    error: float
    count: int

    def text(self, form: str = "{:.3g}") -> str:
        mean = form.format(self.mean)
        return mean if math.isnan(self.error) else f"{mean} ± {form.format(self.error).lstrip('+')}"


def estimate(values: Sequence[float]) -> Estimate:
    """Raises ValueError without values."""
    if not values:
        raise ValueError("a mean needs at least one value, got none")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, math.nan, 1)
    return Estimate(mean, math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n), n)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Welch's t test of mean(a) - mean(b): two-sided, unequal variances."""

    difference: float
    p_value: float
    """nan if one side has a single value."""

    @property
    def is_significant(self) -> bool:
        return self.p_value < SIGNIFICANT


def welch(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Source: Welch 1947, "The generalization of 'Student's' problem when several different population variances are
    involved".
    """
    first, second = estimate(a), estimate(b)
    difference = first.mean - second.mean
    error, df = _welch_error(first.error, first.count, second.error, second.count)
    if math.isnan(error):
        return Comparison(difference, math.nan)
    if error == 0:
        return Comparison(difference, 0.0 if difference else 1.0)
    return Comparison(difference, float(2 * stats.t.sf(abs(difference / error), df)))


def stratified(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Comparison:
    """As `welch`, of the mean difference over strata (a, b), each counting the same.

    Source: Satterthwaite 1946, "An approximate distribution of estimates of variance components".
    """
    differences = [estimate(a).mean - estimate(b).mean for a, b in pairs]
    difference = math.fsum(differences) / len(pairs)
    terms = [(each.error**2 / len(pairs) ** 2, each.count - 1) for a, b in pairs for each in (estimate(a), estimate(b))]
    variance = math.fsum(square for square, _ in terms)
    if math.isnan(variance):
        return Comparison(difference, math.nan)
    if variance == 0:
        return Comparison(difference, 0.0 if difference else 1.0)
    df = variance**2 / math.fsum(square**2 / free for square, free in terms)
    return Comparison(difference, float(2 * stats.t.sf(abs(difference) / math.sqrt(variance), df)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Each p-value corrected for how many there are, so that the chance of a single false alarm stays 5 %.

    The k-th smallest of n times n - k + 1, and no less than those before it. nan stays nan and does not count.
    Source: Holm 1979, "A simple sequentially rejective multiple test procedure".
    """
    adjusted, least = list(p_values), 0.0
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Confidence interval of mean(a) / mean(b), by Fieller's theorem; (-inf, inf) where the seeds do not bound it.

    The ratios r with (mean(a) - r mean(b))^2 <= t^2 (error(a)^2 + r^2 error(b)^2).
    Source: Fieller 1954, "Some problems in interval estimation"; t with Welch's degrees of freedom.
    """
    top, bottom = estimate(a), estimate(b)
    if math.isnan(top.error) or math.isnan(bottom.error) or bottom.mean == 0:
        return -math.inf, math.inf
    scale = abs(top.mean / bottom.mean)
    error, df = _welch_error(top.error, top.count, bottom.error * scale, bottom.count)
    t = float(stats.t.ppf((1 + CONFIDENCE) / 2, df)) if error else 0.0
    square = bottom.mean**2 - (t * bottom.error) ** 2
    half_linear = top.mean * bottom.mean
    constant = top.mean**2 - (t * top.error) ** 2
    under_root = half_linear**2 - square * constant
    if square <= 0 or under_root < 0:
        return -math.inf, math.inf
    root = math.sqrt(under_root)
    return (half_linear - root) / square, (half_linear + root) / square


def _welch_error(error_a: float, count_a: int, error_b: float, count_b: int) -> tuple[float, float]:
    """(standard error, degrees of freedom) of a difference of two means."""
    squares = error_a**2, error_b**2
    total = sum(squares)
    if math.isnan(total) or total == 0:
        return math.sqrt(total), 1.0
    return math.sqrt(total), total**2 / (squares[0] ** 2 / (count_a - 1) + squares[1] ** 2 / (count_b - 1))
