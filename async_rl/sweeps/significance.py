"""Compares the best staleness bound with the others, and each correction with none, by tests over seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from async_rl.sweeps.records import read_record
from async_rl.sweeps.settings import Setting, baseline
from async_rl.sweeps.statistics import CONFIDENCE, estimate, holm, p_value, ratio_text, stratified
from async_rl.sweeps.tables import Table

SPEEDS = {
    "effective_steps_per_minute": ("effective steps per minute", "{:.1f}"),
    "effective_steps_sampled": ("effective steps per minute by sampled reward", "{:.1f}"),
    "per_minute": ("improvement per minute", "{:+.3f}"),
}
"""The names and number formats of the values that say how fast a setting learns, the better one first."""


def speed_key(rows: Sequence[Setting]) -> str:
    """Return the value by which rows are ranked: effective steps a minute, where these can be told for any row."""
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
    """Return the axes along which the unit of `speed_key` differs, also among rows without a value of it.

    Rows of exact mode don't count.
    """
    if speed_key(rows) == "per_minute":
        return []
    units = [row.beside_staleness for row in rows if not row.exact]
    return [labels[0][0] for labels in zip(*units, strict=True) if len({*labels}) > 1]


def which_are_bold(rows: Sequence[Setting]) -> str:
    """Return the sentence that says which rows of a table are set in bold."""
    axes = " and ".join(unit_axes(rows))
    row = f"Of the rows with equal {axes}, the one" if axes else "The row"
    return f"{row} that learns fastest per minute is bold."


def best_row(rows: Sequence[Setting]) -> str:
    """Return text that names the best row, or says that there is none; "" if there is only one row to compare.

    With several units it names the best of each that has other rows. With one seed it says what that leaves open.
    """
    if len(rows) == 1:
        return ""
    orders, key, axes = ranked(rows), speed_key(rows), unit_axes(rows)
    name, form = SPEEDS[key]
    if not orders:
        return f"No row is the best one: no setting with staleness.mode=bounded has a value of {name}."
    sentences = []
    for best in (order[0] for order in orders if order[1:]):
        same = f" of those with {_labels(best, axes)}" if axes else ""
        told = best.estimate(key).text(form)
        if _has_improved(best, key):
            sentences.append(f"On this hardware {best.name} has the most {name}{same}: {told}.")
        else:
            sentences.append(f"No setting has improved beyond its error: {best.name} has the most {name}, {told}.")
        if len(best.runs) == 1:
            sentences.append("Whether others differ from it can't be judged from a single seed.")
    if axes:
        sentences.append(
            f"Effective steps of rows with another {' or '.join(axes)} have another unit: compare these rows by the "
            "reward of the policy or by held-out accuracy."
        )
    return " ".join(sentences)


def _has_improved(row: Setting, key: str) -> bool:
    """Whether a row has learned at all, by `speed_key`; effective steps are told only where synchronous training has.
    """
    found = row.estimate(key)
    return key != "per_minute" or found.mean > 2 * (0.0 if math.isnan(found.error) else found.error)


def _labels(row: Setting, axes: Sequence[str]) -> str:
    return ", ".join(f"{axis} {label}" for axis, label in row.series if axis in axes)


def bounds_compared(rows: Sequence[Setting]) -> list[Table]:
    """Return a table for each list of `ranked` with several rows, which compares them with the best and the baseline.

    The baseline is the row with the smallest staleness in the best row's series. The best row is chosen by the same
    data, so the p-values are corrected for the number of other rows. Still they are somewhat too small: in simulated
    sweeps of five equal rows with five seeds, 6 % have one below 0.05. Effective steps of two rows share the error of
    the synchronous curve, so their p-values are rather too large.
    """
    return [_compared(order, baseline(rows, order[0]), speed_key(rows)) for order in ranked(rows) if order[1:]]


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
    """Return tables that compare each correction with none in runs with staleness.mode=exact.

    They compare at each staleness.max above 0 and on average over these. There is one table for the improvement and one
    for the mean reward; there is none if the rows hold no such runs. Holm's correction is applied to all
    averages of a table together, and to all its single comparisons together.
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
    return [_correction_table(pairs, key, key.replace("_", ", ")) for key in measured if pairs]


def _correction_table(pairs: dict[str, list[tuple[Setting, Setting]]], key: str, label: str) -> Table:
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
    return Table(header, lines, f"Corrections: {label}")


def went_on(rows: Sequence[Setting]) -> str:
    """Return one sentence that names the runs that were cut short and went on from a checkpoint, or ""."""
    records = [(run.folder, read_record(run.folder)) for row in rows for run in row.runs]
    names = [folder.name for folder, record in records if record and record.resumed]
    if not names:
        return ""
    return f"These runs were cut short and went on from a checkpoint, so their times are of parts: {', '.join(names)}."


def ended_early(rows: Sequence[Setting]) -> str:
    """Return one sentence that names the runs that ended early and why, or "" if there are none."""
    ended = [
        f"{run.folder.name} after {len(run.steps)} steps ({run.summary['ended'].rstrip('.')})"
        for row in rows for run in row.runs if run.summary.get("ended")
    ]
    return f"These runs ended early and count with the steps they took: {'; '.join(ended)}." if ended else ""


def not_evaluated(rows: Sequence[Setting]) -> str:
    """Return sentences that name the ended runs that have evaluations, but none of their start or of their end, or "".
    """
    sentences = []
    for end, version in (("start", "version 0"), ("end", "their last version")):
        names = [
            run.folder.name
            for row in rows for run, accuracy in zip(row.runs, row.values[f"accuracy_{end}"], strict=True)
            if run.evals and run.has_ended and math.isnan(accuracy)
        ]
        if names:
            sentences.append(
                f"These runs ended without an evaluation of {version}, so that their settings have no held-out "
                f"accuracy at the {end} and no improvement, and stand in no comparison by either: {', '.join(names)}."
            )
    return " ".join(sentences)
