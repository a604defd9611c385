"""Gathers the seeds of each setting in a row, and computes the values that runs have only beside others.

What a step is worth (efficiency.py) is told by held-out accuracy, compared with synchronous training. Where that can't
be told, it is told by the rewards of the policies (policy_curve.py), compared with the setting whose staleness is the
lowest, under names of its own. The mean of these rewards over the time is taken over the seconds that all runs have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from async_rl.tools.sweeps.cells import SEED, STALENESS, Bound
from async_rl.tools.sweeps.efficiency import Evaluations, effective_steps, why_unknown
from async_rl.tools.sweeps.policy_curve import mean_rewards
from async_rl.tools.sweeps.results import Run
from async_rl.tools.sweeps.statistics import Estimate, estimate

WORTH = ("efficiency", "effective_steps_per_minute")
"""The worth of a step by held-out accuracy, and the steps a minute times it."""
WORTH_BY_REWARD = ("efficiency_sampled", "effective_steps_sampled")
"""The same by the rewards of the policies."""
INSTEAD = ("improvement", "per_minute")
"""The columns shown only if neither is known: they flatter stale runs."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The runs with one combination of settings, one for each seed. `values` has, by name, a value of each run."""

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
        """The labels on all axes outside the section `staleness`. Rows with other ones have other effective steps."""
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
        """Return a value's mean over the seeds with its standard error; of staleness_max the maximum, without error."""
        values = self.values[key]
        return Estimate(max(values), math.nan) if key == "staleness_max" else estimate(values)


def worth_keys(rows: Iterable[Setting]) -> tuple[str, str]:
    """Return the keys of what a step is worth: by accuracy if a row has it, else by reward, else INSTEAD."""
    has = {keys for row in rows for keys in (WORTH, WORTH_BY_REWARD) if row.has(keys[0])}
    return next((keys for keys in (WORTH, WORTH_BY_REWARD) if keys in has), INSTEAD)


def settings_of(runs: Iterable[Run]) -> list[Setting]:
    """Return a row for each combination of settings. Values that can't be told are nan; `efficiency_unknown` says why.

    What is told by the steps of runs stays as it was stored where runs were read from runs.csv, which has no steps.
    """
    grouped: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.settings, []).append(run)
    rows = []
    for same in grouped.values():
        of_runs = [run.values() for run in same]
        rows.append(Setting(tuple(same), {key: [values[key] for values in of_runs] for key in of_runs[0]}))
    for row in rows:
        row.values.update(zip(WORTH, _worth(row, synchronous_runs(rows, row)), strict=True))
    if any(run.steps for row in rows for run in row.runs):
        for row in rows:
            row.values.update(zip(WORTH_BY_REWARD, _worth_by_reward(row, _others(rows, row)), strict=True))
        _add_policy_rewards([row for row in rows if not row.exact])
    return rows


def _add_policy_rewards(rows: Sequence[Setting]) -> None:
    rewards, seconds = mean_rewards([run.policy_curve for row in rows for run in row.runs])
    found = iter(rewards)
    for row in rows:
        row.values["policy_reward"] = [next(found) for _ in row.runs]
        row.values["policy_seconds"] = [seconds] * len(row.runs)


def _worth(row: Setting, synchronous: Sequence[Run]) -> list[list[float]]:
    if why_unknown([run.evaluations for run in synchronous]) or _lacks_error(row, synchronous):
        return [[math.nan] * len(row.runs)] * 2
    if row.staleness.max == 0:
        return [[1.0] * len(row.runs), row.values["steps_per_minute"]]
    return _compared(row, synchronous, lambda run: run.evaluations, within=False)


def _worth_by_reward(row: Setting, others: Sequence[Setting]) -> list[list[float]]:
    other = _lowest(others)
    curves = [run.policy_curve.evaluations() for run in other.runs]
    if len(others) == 1 or why_unknown(curves, "reward") or _lacks_error(row, other.runs):
        return [[math.nan] * len(row.runs)] * 2
    if row is other:
        return [[1.0] * len(row.runs), row.values["steps_per_minute"]]
    return _compared(row, other.runs, lambda run: run.policy_curve.evaluations(), within=True)


def _lacks_error(row: Setting, others: Sequence[Run]) -> bool:
    """Whether runs of several seeds would be compared with one run alone, whose curve has an error that is not
    known."""
    return len(others) == 1 < len(row.runs)


def _compared(
    row: Setting, others: Sequence[Run], learned: Callable[[Run], Evaluations], *, within: bool
) -> list[list[float]]:
    """Return efficiency and effective steps a minute of each run of `row`, see `efficiency.per_seed`."""
    found = effective_steps(
        {run.labels[SEED]: learned(run) for run in row.runs},
        {run.labels[SEED]: speed for run, speed in zip(row.runs, row.values["steps_per_minute"], strict=True)},
        [(run.labels[SEED], learned(run)) for run in others], within,
    )
    return [[float(value) for value in values] for values in found.T]


def efficiency_unknown(rows: Sequence[Setting]) -> list[str]:
    """Return a sentence for each reason why the efficiency of some rows can't be told; none for a single row.

    If it can't be told for any row, and the runs have steps, the last sentence gives it by sampled reward.
    """
    if len(rows) == 1:
        return []
    reasons: dict[str, list[Setting]] = {}
    for row in rows:
        if not row.has("efficiency"):
            synchronous = synchronous_runs(rows, row)
            reason = why_unknown([run.evaluations for run in synchronous])
            if not reason and _lacks_error(row, synchronous):
                reason = f"{synchronous[0].folder.name} is the only synchronous run, so its curve has no known error"
            reason = reason or "its held-out accuracy is missing, or lies above all of synchronous training's"
            reasons.setdefault(reason, []).append(row)
    sentences = []
    for reason, without in reasons.items():
        names = "" if len(without) == len(rows) else f" at {'; '.join(row.name for row in without)}"
        sentences.append(f"How many synchronous steps a step is worth{names} can't be told: {reason}.")
    if any(row.has("efficiency_sampled") for row in rows) and not any(row.has("efficiency") for row in rows):
        compared = {other.name: other for row in rows if (other := _lowest(_others(rows, row))) is not row}
        sentences.append(f"By sampled reward, a step is compared with those at {'; '.join(compared)}.")
    return sentences


def synchronous_runs(rows: Sequence[Setting], row: Setting) -> list[Run]:
    """Return the runs with staleness.max 0 that have the labels of `row` on all axes outside the section `staleness`.

    Its other keys change nothing in a run without staleness.
    """
    return [run for other in _others(rows, row) if other.staleness.max == 0 for run in other.runs]


def _lowest(rows: Sequence[Setting]) -> Setting:
    return min(rows, key=lambda row: row.staleness)


def _others(rows: Sequence[Setting], row: Setting) -> list[Setting]:
    """Return the rows with the labels of `row` on all axes outside the section `staleness`, itself included."""
    return [other for other in rows if other.beside_staleness == row.beside_staleness]


def baseline(rows: Sequence[Setting], row: Setting) -> Setting:
    return min((other for other in rows if other.series == row.series), key=lambda other: other.staleness)
