"""Combines the seeds of each setting to a row, compares the rows, and recommends one.

The efficiency of a step (efficiency.py) is computed from held-out accuracy, compared with synchronous training. If that
is not possible, it is computed from the rewards of the policies (policy_curve.py), compared with the setting at the
lowest staleness, and has another name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from async_rl.tools.sweeps.cells import SEED, STALENESS, Bound
from async_rl.tools.sweeps.efficiency import Evaluations, effective_steps, why_unknown
from async_rl.tools.sweeps.policy_curve import evaluations_of
from async_rl.tools.sweeps.results import Run
from async_rl.tools.sweeps.statistics import CONFIDENCE, Estimate, estimate, holm, p_value, ratio_text
from async_rl.tools.sweeps.tables import Table

WORTH = ("efficiency", "effective_steps_per_minute")
"""The efficiency of a step by held-out accuracy, and the steps per minute times this efficiency."""
WORTH_BY_REWARD = ("efficiency_sampled", "effective_steps_sampled")
"""The same two values by the rewards of the policies."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A row: the runs with one combination of settings, one for each seed. `values` has, by name, a value for each run.
    """

    runs: tuple[Run, ...]
    values: dict[str, list[float]]

    @property
    def staleness(self) -> Bound:
        return self.runs[0].staleness

    @property
    def series(self) -> tuple[tuple[str, str], ...]:
        return self.runs[0].series

    @property
    def beside_staleness(self) -> tuple[tuple[str, str], ...]:
        """The labels on all axes outside the section `staleness`.

        Only rows with equal ones have comparable effective steps.
        """
        return tuple(pair for pair in self.series if not pair[0].startswith(f"{STALENESS}."))

    @property
    def exact(self) -> bool:
        return self.runs[0].exact

    @property
    def name(self) -> str:
        others = ", ".join(f"{key} {label}" for key, label in self.series)
        return f"staleness {self.staleness}" + (f" ({others})" if others else "")

    def has(self, key: str) -> bool:
        return not all(map(math.isnan, self.values[key]))

    def estimate(self, key: str) -> Estimate:
        """Return the mean over the seeds of a value, with its standard error.

        For staleness_max: the maximum, without error.
        """
        values = self.values[key]
        return Estimate(max(values), math.nan) if key == "staleness_max" else estimate(values)


def worth_keys(rows: Sequence[Setting]) -> tuple[str, ...]:
    """Return the names of the efficiency values that are known: by accuracy, else by sampled reward; () if neither is.
    """
    return next((keys for keys in (WORTH, WORTH_BY_REWARD) if any(row.has(keys[0]) for row in rows)), ())


def settings_of(runs: Iterable[Run]) -> list[Setting]:
    """Return one `Setting` for each combination of settings, made of all runs that have it.

    Its efficiency values compare it with other rows. Where they can't be computed, they are nan; then
    `efficiency_unknown` gives the reason.
    """
    grouped: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.settings, []).append(run)
    rows = []
    for same in grouped.values():
        of_runs = [run.values() for run in same]
        rows.append(Setting(tuple(same), {key: [values[key] for values in of_runs] for key in of_runs[0]}))
    for row in rows:
        others = _others(rows, row)
        freshest = _lowest(others).runs if len(others) > 1 else ()
        row.values.update(zip(WORTH, _worth(row, synchronous_runs(rows, row)), strict=True))
        row.values.update(zip(WORTH_BY_REWARD, _worth(row, freshest, by_reward=True), strict=True))
    return rows


def _worth(row: Setting, base: Sequence[Run], *, by_reward: bool = False) -> list[list[float]]:
    """Return the efficiency and the effective steps per minute of each run of `row`, as in `efficiency.per_seed`.

    Args:
        base: the runs to compare with.
    """

    def learned(run: Run) -> Evaluations:
        return evaluations_of(run.policy_curve) if by_reward else run.evaluations

    curves = [(run.labels[SEED], learned(run)) for run in base]
    unknown = why_unknown([curve for _, curve in curves], "reward" if by_reward else "accuracy")
    if unknown or _lacks_error(row, base):
        return [[math.nan] * len(row.runs)] * 2
    speeds = row.values["steps_per_minute"]
    if row.runs[0] in base:
        return [[1.0] * len(row.runs), speeds]
    seeds = [run.labels[SEED] for run in row.runs]
    own = dict(zip(seeds, map(learned, row.runs), strict=True))
    found = effective_steps(own, dict(zip(seeds, speeds, strict=True)), curves, within=by_reward)
    return [[float(value) for value in values] for values in found.T]


def _lacks_error(row: Setting, others: Sequence[Run]) -> bool:
    """Return whether `row` has several seeds but would be compared with a single one, whose curve has an unknown error.
    """
    return len({run.labels[SEED] for run in others}) == 1 < len(row.runs)


def efficiency_unknown(rows: Sequence[Setting]) -> list[str]:
    """Return sentences that say for which rows the efficiency can't be computed, and why; [] for a single row."""
    if len(rows) == 1:
        return []
    reasons: dict[str, list[Setting]] = {}
    for row in rows:
        if not row.has("efficiency"):
            synchronous = synchronous_runs(rows, row)
            reason = why_unknown([run.evaluations for run in synchronous])
            if not reason and _lacks_error(row, synchronous):
                seed = synchronous[0].labels[SEED]
                reason = f"the synchronous runs have only the seed {seed}, so their curve has no known error"
            reason = reason or "its held-out accuracy is missing, or lies above all of synchronous training's"
            reasons.setdefault(reason, []).append(row)
    sentences = []
    for reason, without in reasons.items():
        names = "" if len(without) == len(rows) else f" at {'; '.join(row.name for row in without)}"
        sentences.append(f"How many synchronous steps a step is worth{names} can't be told: {reason}.")
    return sentences


def synchronous_runs(rows: Sequence[Setting], row: Setting) -> list[Run]:
    """Return the synchronous runs (staleness.max 0) with the same labels as `row` on all axes outside `staleness`.

    Other keys of the section `staleness` change nothing in a synchronous run.
    """
    return [run for other in _others(rows, row) if other.staleness.max == 0 for run in other.runs]


def _lowest(rows: Sequence[Setting]) -> Setting:
    return min(rows, key=lambda row: row.staleness)


def _others(rows: Sequence[Setting], row: Setting) -> list[Setting]:
    """Return the rows, including `row`, with the same labels as `row` on all axes outside the section `staleness`."""
    return [other for other in rows if other.beside_staleness == row.beside_staleness]


SPEEDS = {
    "effective_steps_per_minute": ("effective steps per minute", "{:.1f}"),
    "effective_steps_sampled": ("effective steps per minute by sampled reward", "{:.1f}"),
}
"""The (label, number format) of each value that says how fast a setting learns. The better value comes first."""
SIGNIFICANT = 0.05


def speed_key(rows: Sequence[Setting]) -> str:
    """Return the name of the value that ranks rows: effective steps per minute by accuracy, else by sampled reward."""
    first, second = SPEEDS
    return second if not any(row.has(first) for row in rows) and any(row.has(second) for row in rows) else first


def ranked(rows: Sequence[Setting]) -> list[list[Setting]]:
    """Return lists of rows that can be compared with each other, each sorted by effective steps per minute, best first.

    Two rows can be compared if they have equal settings outside the section `staleness`. Otherwise their effective
    steps are different units. Rows in exact mode, and rows without that value (`speed_key`), are left out.
    """
    key = speed_key(rows)

    def speed(row: Setting) -> float:
        return row.estimate(key).mean

    by_unit: dict[tuple[tuple[str, str], ...], list[Setting]] = {}
    for row in rows:
        if not row.exact and not math.isnan(speed(row)):
            by_unit.setdefault(row.beside_staleness, []).append(row)
    return [sorted(of_unit, key=speed, reverse=True) for of_unit in by_unit.values()]


def best_rows(rows: Sequence[Setting]) -> list[Setting]:
    """Return the best row of each list of `ranked` that has several rows, if it improved by more than its error."""
    key = speed_key(rows)
    return [order[0] for order in ranked(rows) if order[1:] and _has_improved(order[0], key)]


def unit_axes(rows: Sequence[Setting]) -> list[str]:
    """Return the axes outside `staleness` on which the rows differ, so that their effective steps can't be compared.

    Rows in exact mode don't count.
    """
    units = [row.beside_staleness for row in rows if not row.exact]
    return [labels[0][0] for labels in zip(*units, strict=True) if len({*labels}) > 1]


def recommendation(rows: Sequence[Setting]) -> str:
    """Return the recommendation of a sweep, shown at the top of `sweep`, `report` and `plan`; "" for a single row.

    It claims no lead that the seeds do not show: a setting is ahead of another if p, with Holm's correction for the
    number of others, is below 0.05. Among settings that can't be distinguished it recommends the one at the lowest
    staleness.
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
    if not _has_improved(best, key):
        return f"No setting{among} has improved beyond its error in {runs}: {most}."
    corrected = holm([p_value(best.values[key], row.values[key]) for row in order[1:]])
    behind = [row for row, p in zip(order[1:], corrected, strict=True) if p < SIGNIFICANT]
    level = [row for row in order if row not in behind]
    if not behind:
        return f"{runs} can't tell these {what} apart: {most}, but no lead beyond the errors. Try more seeds."
    freshest = min(level, key=lambda row: row.staleness)
    text = f"Take {freshest.name}: {most}, beyond the errors more than {_names(behind)}."
    if level[1:]:
        others = _names([row for row in level if row is not best])
        text += f" {runs} can't tell {best.name} apart from {others}; {freshest.name} has the freshest data of these."
    return text


def _names(rows: Sequence[Setting]) -> str:
    return ", ".join(row.name for row in sorted(rows, key=lambda row: row.staleness))


def _size(rows: Sequence[Setting]) -> str:
    """Return the size of the rows' runs, e.g. `2 seeds of 16 steps`."""
    seeds = sorted({len(row.runs) for row in rows})
    runs = [run for row in rows for run in row.runs]
    steps = sorted({len(run.steps) for run in runs})

    def span(values: Sequence[int]) -> str:
        return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"

    return f"{span(seeds)} seed{'s' * (seeds[-1] > 1)} of {span(steps)} steps"


def _has_improved(row: Setting, key: str) -> bool:
    value = row.estimate(key)
    return value.mean > (0.0 if math.isnan(value.error) else value.error)


def bounds_compared(rows: Sequence[Setting]) -> list[Table]:
    """Return a table for each list of `ranked` that has several rows, best first.

    The rows are compared with the best row, and with the lowest bound of its series. The best row is chosen by the same
    data, so the p-values are corrected for the number of other rows; in simulated sweeps of five equal rows with five
    seeds, 6 % still have one below 0.05.
    """
    key = speed_key(rows)
    return [
        _bounds_table(order, _lowest([row for row in rows if row.series == order[0].series]), key)
        for order in ranked(rows) if order[1:]
    ]  # fmt: skip


def _bounds_table(order: Sequence[Setting], base: Setting, key: str) -> Table:
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


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2g}"


def cautions(rows: Sequence[Setting]) -> list[str]:
    """Return sentences that name the runs that ended early, and those that were resumed."""
    runs = [run for row in rows for run in row.runs]
    early = [f"{run.folder.name} ({run.summary['ended'].rstrip('.')})" for run in runs if run.summary.get("ended")]
    resumed = [run.folder.name for run in runs if run.summary.get("resumes")]
    sentences = {
        "These runs ended early and count with the steps they took: {}.": early,
        "These runs went on from a checkpoint, so their times are of parts: {}.": resumed,
    }
    return [sentence.format("; ".join(names)) for sentence, names in sentences.items() if names]
