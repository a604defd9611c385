"""Statistics over seeds: means with standard errors, t tests, and confidence intervals of ratios."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over seeds and its standard error, which is nan for a single seed."""

    mean: float
    error: float

    def text(self, form: str = "{:.3g}") -> str:
        mean = form.format(self.mean)
        return mean if math.isnan(self.error) else f"{mean} ± {form.format(self.error).lstrip('+')}"


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of `values` with its standard error. Raises ValueError if there are no values."""
    if not values:
        raise ValueError("a mean needs at least one value, got none")
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(math.fsum(values) / len(values), error)


def p_value(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the two-sided p-value of mean(a) = mean(b) by Welch's t test, or nan if a or b has fewer than 2 values."""
    if min(len(a), len(b)) < 2:
        return math.nan
    from scipy import stats  # here, as its import takes a second and few commands need it

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy warns of equal values, but its result is right
        return float(stats.ttest_ind(a, b, equal_var=False).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for their number by Holm's method (1979). A nan stays nan and does not count.

    The k-th smallest of n is multiplied by n - k + 1, and is at least as large as the smaller ones.
    """
    adjusted, least = list(p_values), 0.0
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = least
    return adjusted


def ratio_text(a: Sequence[float], b: Sequence[float]) -> str:
    """Return mean(a) / mean(b) with its confidence interval as text, or `-` if mean(b) is not above 0."""
    if not np.mean(b) > 0:
        return "-"
    low, high = ratio_interval(a, b)
    interval = f"{low:.2f} to {high:.2f}" if math.isfinite(low) else "not bounded by these seeds"
    return f"{np.mean(a) / np.mean(b):.2f} ({interval})"


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return the confidence interval of mean(a) / mean(b) by Fieller's theorem (1954); (-inf, inf) if it is unbounded.

    It contains the ratios r with (mean(a) - r mean(b))^2 <= t^2 (error(a)^2 + r^2 error(b)^2), where t is the quantile
    of Student's distribution.
    """
    top, bottom = estimate(a), estimate(b)
    if math.isnan(top.error) or math.isnan(bottom.error) or bottom.mean == 0:
        return -math.inf, math.inf
    t = 0.0
    if top.error or bottom.error:
        from scipy import stats

        scaled = [value * top.mean / bottom.mean for value in b]
        t = float(stats.t.ppf((1 + CONFIDENCE) / 2, stats.ttest_ind(a, scaled, equal_var=False).df))
    square = bottom.mean**2 - (t * bottom.error) ** 2
    half_linear = top.mean * bottom.mean
    under_root = half_linear**2 - square * (top.mean**2 - (t * top.error) ** 2)
    if square <= 0 or under_root < 0:
        return -math.inf, math.inf
    root = math.sqrt(under_root)
    return (half_linear - root) / square, (half_linear + root) / square
