"""What a sweep says in words: which staleness to run, how much sooner it is there, what a correction is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.results import Row, Run, baseline
from benchmarks.statistics import CONFIDENCE, SIGNIFICANT, estimate, holm, ratio_interval, stratified, welch

CORRECTION = "correction"
UNCORRECTED = "none"
WAY = 0.75
"""Share of what the baseline learned that time to accuracy is measured to: past the noise, before the plateau."""


def ranked(rows: Sequence[Row]) -> list[Row]:
    """By reward per wall-clock, best first. Exact mode is left out: its utilisation is not the trade-off's."""
    counted = [row for row in rows if not row.exact and not math.isnan(_gain(row))]
    return sorted(counted, key=_gain, reverse=True)


def _gain(row: Row) -> float:
    return row.estimate("per_minute").mean


def recommendation(rows: Sequence[Row]) -> str:
    """One sentence: the best staleness, its gain over 0 with an interval, and whether the next best differs."""
    order = ranked(rows)
    if not order:
        return "No recommendation: no finished run of bounded staleness measured a reward."
    best, base = order[0], baseline(rows, order[0])
    gain = best.estimate("per_minute")
    text = f"On this hardware {best.name} gains most reward per wall-clock: {gain.text('{:+.3f}')} a minute"
    if best is not base:
        text += f", {_ratio_text(best, base)} that of {base.name}"
    if len(order) > 1:
        text += f"; the difference from the next best, {order[1].name}, {_difference_text(best, order[1:])}"
    return text + "."


def _ratio_text(best: Row, base: Row) -> str:
    over, under = best.values["per_minute"], base.values["per_minute"]
    if not estimate(under).mean > 0:
        return "against nothing gained by"
    low, high = ratio_interval(over, under)
    interval = f"{low:.2f} to {high:.2f}" if math.isfinite(low) else "not bounded by these seeds"
    return f"{estimate(over).mean / estimate(under).mean:.2f} times ({CONFIDENCE:.0%} interval {interval})"


def _difference_text(best: Row, others: Sequence[Row]) -> str:
    """Of the best from the first of the others; all others are tested, as the best is known only after the fact."""
    raw = [welch(best.values["per_minute"], other.values["per_minute"]).p_value for other in others]
    adjusted = holm(raw)
    if math.isnan(raw[0]):
        return "can't be judged from a single seed"
    seeds = min(len(best.runs), len(others[0].runs))
    is_significant = adjusted[0] < SIGNIFICANT
    test = f"Welch's t test, p = {raw[0]:.2g}"
    if len(others) > 1:
        test += f", {adjusted[0]:.2g} with Holm's correction for {len(others)} comparisons"
    text = f"{'is' if is_significant else 'is not'} significant over {seeds} seeds ({test})"
    close = [other.name for other, p in zip(others[1:], adjusted[1:], strict=True) if not p < SIGNIFICANT]
    if close:
        text += f", {'but not' if is_significant else 'nor'} from {', '.join(close)}"
    return text


def seconds_to(run: Run, accuracy: float) -> float | None:
    """Time from the end of the first step until held-out accuracy first reached `accuracy`, between two evaluations
    by straight line; None if it never did.
    """
    before: tuple[float, float] | None = None
    for _, seconds, value in run.evals:
        if value >= accuracy:
            if before is None or value == before[1]:
                return seconds
            share = (accuracy - before[1]) / (value - before[1])
            return before[0] + share * (seconds - before[0])
        before = (seconds, value)
    return None


def time_to_accuracy(rows: Sequence[Row]) -> str:
    """Wall-clock to a fixed held-out accuracy, the best row against staleness 0, as a ratio with an interval. The
    accuracy is fixed by staleness 0 alone: WAY of the way that its runs made on average.
    """
    order = ranked(rows)
    if not order or order[0] is (base := baseline(rows, order[0])):
        return ""
    best = order[0]
    if any(len(run.evals) < 3 for run in (*best.runs, *base.runs)):
        return ""
    first, last = (estimate([run.evals[end][2] for run in base.runs]).mean for end in (0, -1))
    target = math.floor(100 * (first + WAY * (last - first))) / 100
    if target <= max(run.evals[0][2] for run in (*best.runs, *base.runs)):
        return ""  # the baseline learned too little to tell the way from the start
    what = f"Held-out accuracy {target:.2f}, {WAY:.0%} of the way that {base.name} made,"
    fast, slow = ([seconds_to(run, target) for run in row.runs] for row in (best, base))
    if missing := sum(seconds is None for seconds in (*fast, *slow)):
        return f"{what} was not reached by {missing} of {len(fast) + len(slow)} runs of {base.name} and {best.name}."
    fast_s, slow_s = ([seconds or 0.0 for seconds in times] for times in (fast, slow))
    low, high = ratio_interval(slow_s, fast_s)
    interval = f"{low:.2f} to {high:.2f}" if math.isfinite(low) else "not bounded by these seeds"
    return (
        f"{what} took {base.name} {estimate(slow_s).text('{:.1f}')} s and {best.name} "
        f"{estimate(fast_s).text('{:.1f}')} s: {estimate(slow_s).mean / estimate(fast_s).mean:.2f} times faster "
        f"({CONFIDENCE:.0%} interval {interval})."
    )


def corrections_compared(rows: Sequence[Row]) -> str:
    """What each correction gains over none where staleness is exact and above 0; empty without such rows."""
    exact = [row for row in rows if row.exact and row.staleness > 0]
    pairs = [
        (row, other) for row in exact for other in exact
        if _correction(other) == UNCORRECTED and _correction(row) not in (UNCORRECTED, "")
        and row.staleness == other.staleness and _without(row) == _without(other)
    ]
    of_each: dict[str, list[tuple[int, Sequence[float], Sequence[float]]]] = {}
    for row, other in pairs:
        values = row.values["per_100_steps"], other.values["per_100_steps"]
        of_each.setdefault(_correction(row), []).append((row.staleness, *values))
    if not of_each:
        return ""
    singles = [welch(ours, none) for found in of_each.values() for _, ours, none in found]
    overall = [stratified([(ours, none) for _, ours, none in found]) for found in of_each.values()]
    if all(math.isnan(test.p_value) for test in (*singles, *overall)):
        return "What a correction is worth at exact staleness can't be judged from a single seed."
    adjusted, overall_p = (holm([test.p_value for test in tests]) for tests in (singles, overall))
    parts, tests = [], zip(singles, adjusted, strict=True)
    for (correction, found), average, average_p in zip(of_each.items(), overall, overall_p, strict=True):
        apart = [
            f"{test.difference:+.3f} at {staleness} (p = {p:.2g})"
            for (staleness, _, _), (test, p) in zip(found, tests, strict=False) if p < SIGNIFICANT
        ]
        parts.append(
            f"{correction} {average.difference:+.3f} on average over {', '.join(str(k) for k, _, _ in found)} "
            f"(p = {average_p:.2g}), singly {', '.join(apart) or 'nothing significant'}"
        )
    return (
        "At exact staleness, improvement per 100 steps against no correction (Welch's t tests, Holm's correction for "
        f"{len(overall)} averages and for {len(pairs)} single comparisons): {'; '.join(parts)}."
    )


def ended_early(rows: Sequence[Row]) -> str:
    """Which runs had nothing left to learn from, and count with the steps they took."""
    ended = [
        f"{run.folder.name} after {len(run.steps)} steps ({run.summary['ended'].rstrip('.')})"
        for row in rows for run in row.runs if run.summary.get("ended")
    ]
    return f"Ended before the others, and counted as they are: {'; '.join(ended)}." if ended else ""


def _correction(row: Row) -> str:
    return dict(row.series).get(CORRECTION, "")


def _without(row: Row) -> list[tuple[str, str]]:
    return [pair for pair in row.series if pair[0] != CORRECTION]
