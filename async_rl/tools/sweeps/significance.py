"""Which setting to take, and what the seeds say about it: tests over seeds between settings and between corrections."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from async_rl.tools.sweeps.records import read_record
from async_rl.tools.sweeps.settings import Setting, baseline
from async_rl.tools.sweeps.statistics import CONFIDENCE, estimate, holm, p_value, ratio_text, stratified
from async_rl.tools.sweeps.tables import Table

SPEEDS = {
    "effective_steps_per_minute": ("effective steps per minute", "{:.1f}"),
    "effective_steps_sampled": ("effective steps per minute by sampled reward", "{:.1f}"),
    "per_minute": ("improvement per minute", "{:+.3f}"),
}
"""The names and number formats of the values that say how fast a setting learns, the better one first."""
SIGNIFICANT = 0.05


def speed_key(rows: Sequence[Setting]) -> str:
    """Return the value that ranks rows: effective steps a minute, where these can be told for any row."""
    return next((key for key in SPEEDS if any(row.has(key) for row in rows)), "per_minute")


def ranked(rows: Sequence[Setting]) -> list[list[Setting]]:
    """Return the rows by `speed_key`, best first, in a list for each unit of that value.

    An effective step is a step of rows with equal settings outside the section `staleness`, so rows that differ there
    have different units. Rows of exact mode and rows without the value are left out.
    """
    key = speed_key(rows)

    def speed(row: Setting) -> float:
        return row.estimate(key).mean

    by_unit: dict[tuple[tuple[str, str], ...], list[Setting]] = {}
    for row in rows:
        if not row.exact and not math.isnan(speed(row)):
            by_unit.setdefault(() if key == "per_minute" else row.beside_staleness, []).append(row)
    return [sorted(of_unit, key=speed, reverse=True) for of_unit in by_unit.values()]


def best_rows(rows: Sequence[Setting]) -> list[Setting]:
    """Return the best row of each unit that has other rows, if it has improved beyond its error."""
    key = speed_key(rows)
    return [order[0] for order in ranked(rows) if order[1:] and _has_improved(order[0], key)]


def unit_axes(rows: Sequence[Setting]) -> list[str]:
    """Return the axes along which the unit of `speed_key` differs. Rows of exact mode don't count."""
    if speed_key(rows) == "per_minute":
        return []
    units = [row.beside_staleness for row in rows if not row.exact]
    return [labels[0][0] for labels in zip(*units, strict=True) if len({*labels}) > 1]


def recommendation(rows: Sequence[Setting]) -> str:
    """Return what a sweep recommends: the sentence at the top of `sweep`, `report` and `plan`; "" without other rows.

    It claims no lead that the seeds do not show: a setting is ahead of another where p, with Holm's correction for the
    number of others, is below 0.05. Among settings that can't be told apart it recommends the lowest staleness.
    """
    if len(rows) == 1:
        return ""
    orders, key, axes = ranked(rows), speed_key(rows), unit_axes(rows)
    if not orders:
        return f"No setting is recommended: none with staleness.mode=bounded has a value of {SPEEDS[key][0]}."
    sentences = [_recommended(order, key, axes) for order in orders if order[1:]]
    if axes:
        sentences.append(
            f"Effective steps of rows with another {' or '.join(axes)} have another unit: compare these rows by the "
            "reward of the policy or by held-out accuracy."
        )
    return " ".join(sentences)


def _recommended(order: Sequence[Setting], key: str, axes: Sequence[str]) -> str:
    best, (name, form) = order[0], SPEEDS[key]
    among = "".join(f" with {axis} {dict(best.series)[axis]}" for axis in axes)
    what = ("bounds" if all(not row.series and row.staleness.is_full for row in order) else "settings") + among
    most = f"{best.name} has the most {name}, {best.estimate(key).text(form)}"
    runs = _size(order)
    flatters = " It is speed alone: what a step is worth could not be told." if key == "per_minute" else ""
    if not _has_improved(best, key):
        return f"No setting{among} has improved beyond its error in {runs}: {most}."
    corrected = holm([p_value(best.values[key], row.values[key]) for row in order[1:]])
    behind = [row for row, p in zip(order[1:], corrected, strict=True) if p < SIGNIFICANT]
    level = [row for row in order if row not in behind]
    if not behind:
        return f"{runs} can't tell these {what} apart: {most}, but no lead beyond the errors. Try more seeds.{flatters}"
    freshest = min(level, key=lambda row: row.staleness)
    text = f"Take {freshest.name}: {most}, beyond the errors more than {_names(behind)}."
    if level[1:]:
        others = _names([row for row in level if row is not best])
        text += f" {runs} can't tell {best.name} apart from {others}; {freshest.name} has the freshest data of these."
    return text + flatters


def _names(rows: Sequence[Setting]) -> str:
    return ", ".join(row.name for row in sorted(rows, key=lambda row: row.staleness))


def _size(rows: Sequence[Setting]) -> str:
    """Return e.g. `2 seeds of 16 steps`."""
    seeds = sorted({len(row.runs) for row in rows})
    runs = [run for row in rows for run in row.runs]
    steps = sorted({int(len(run.steps) or (run.evals[-1][0] if run.evals else 0)) for run in runs})

    def span(values: Sequence[int]) -> str:
        return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"

    return f"{span(seeds)} seed{'s' * (seeds[-1] > 1)}" + (f" of {span(steps)} steps" if steps[0] else "")


def _has_improved(row: Setting, key: str) -> bool:
    value = row.estimate(key)
    return value.mean > (0.0 if math.isnan(value.error) else value.error)


def bounds_compared(rows: Sequence[Setting]) -> list[Table]:
    """Return a table of settings for each unit of `speed_key` with several of them, best first.

    They are compared with the best row, and with the lowest bound of its series. The best row is chosen by the same
    data, so the p-values are corrected for the number of other rows; in simulated sweeps of five equal rows with five
    seeds, 6 % still have one below 0.05.
    """
    key = speed_key(rows)
    return [_compared(order, baseline(rows, order[0]), key) for order in ranked(rows) if order[1:]]


def _compared(order: Sequence[Setting], base: Setting, key: str) -> Table:
    best = order[0]
    title, form = SPEEDS[key]
    raw = [p_value(best.values[key], row.values[key]) for row in order[1:]]
    header = (
        "setting", title, f"times that of {base.name} ({CONFIDENCE:.0%} interval)",
        "p, equal to the best", "p, Holm's correction",
    )  # fmt: skip
    lines = []
    for row, p, corrected in zip(order, [math.nan, *raw], [math.nan, *holm(raw)], strict=True):
        times = "-" if row is base else ratio_text(row.values[key], base.values[key])
        lines.append([row.name, row.estimate(key).text(form), times, _number(p), _number(corrected)])
    return Table(header, lines, "Which setting learns fastest", best=(0,) if _has_improved(best, key) else ())


def _number(value: float, form: str = "{:.2g}") -> str:
    return "-" if math.isnan(value) else form.format(value)


def corrections_compared(rows: Sequence[Setting]) -> list[Table]:
    """Return tables that compare each correction with none in runs with staleness.mode=exact, if there are any.

    They compare at each staleness.max above 0 and on average over these, one table for the improvement and one for the
    mean reward. Holm's correction is applied to all averages of a table together, and to all its single comparisons.
    """
    pairs: dict[str, list[tuple[Setting, Setting]]] = {}
    exact = [row for row in rows if row.exact and row.staleness.max > 0]
    for row, other in itertools.product(exact, exact):
        ours, none = dict(row.series), dict(other.series)
        correction = ours.pop("correction", "none")
        is_same_setting = none.pop("correction", "") == "none" and ours == none and row.staleness == other.staleness
        if correction != "none" and is_same_setting:
            pairs.setdefault(correction, []).append((row, other))
    measured = [key for key in ("improvement", "reward_mean") if any(row.has(key) for row in exact)]
    return [_correction_table(pairs, key) for key in measured if pairs]


def _correction_table(pairs: dict[str, list[tuple[Setting, Setting]]], key: str) -> Table:
    singles, averages = [], []
    for correction, found in pairs.items():
        values = [(row.values[key], other.values[key]) for row, other in found]
        averages.append((correction, "average", *stratified(values)))
        for (row, _), (ours, none) in zip(found, values, strict=True):
            difference = estimate(ours).mean - estimate(none).mean
            singles.append((correction, str(row.staleness), difference, p_value(ours, none)))
    lines = [
        [correction, staleness, _number(difference, "{:+.3f}"), _number(p), _number(corrected)]
        for tests in (averages, singles)
        for (correction, staleness, difference, p), corrected in zip(tests, holm([t[3] for t in tests]), strict=True)
    ]
    header = ("correction", "exact staleness", "difference from none", "p, no difference", "p, Holm's correction")
    return Table(header, lines, f"Corrections: {key.replace('_', ', ')}")


def cautions(rows: Sequence[Setting]) -> list[str]:
    """Return sentences that name the runs whose values have another meaning: ended early, not evaluated, resumed."""
    runs = [run for row in rows for run in row.runs]
    early = [f"{run.folder.name} ({run.summary['ended'].rstrip('.')})" for run in runs if run.summary.get("ended")]
    without = [run.folder.name for run in runs if run.steps and run.evals and math.isnan(run.improvement)]
    resumed = [run.folder.name for run in runs if (record := read_record(run.folder)) and record.resumed]
    sentences = {
        "These runs ended early and count with the steps they took: {}.": early,
        "These runs have no held-out evaluation of their start or of their end, so their settings have no improvement: "
        "{}.": without,
        "These runs went on from a checkpoint, so their times are of parts: {}.": resumed,
    }
    return [sentence.format("; ".join(names)) for sentence, names in sentences.items() if names]
