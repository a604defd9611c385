"""What the runs of a sweep came to: values of each run, gathered over seeds, and the recommendation."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.metrics import read_metrics
from benchmarks.cells import SEED, STALENESS, read_record
from benchmarks.statistics import CONFIDENCE, Estimate, estimate, ratio_interval, welch

Record = dict[str, float | None]
EXACT = ("mode", "exact")
"""Of a series whose utilisation is not the trade-off's."""


@dataclass(frozen=True, slots=True)
class Run:
    """One finished run, alone or as a cell of a sweep."""

    labels: dict[str, str]
    summary: dict[str, Any]
    steps: list[Record]
    evals: list[tuple[float, float, float]]
    """(version, seconds since the end of the first step, held-out accuracy)"""
    folder: Path

    @property
    def staleness(self) -> int:
        return int(self.labels[STALENESS])

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        """Everything but the seed."""
        return tuple((key, label) for key, label in self.labels.items() if key != SEED)

    @property
    def series(self) -> tuple[tuple[str, str], ...]:
        """Everything but seed and staleness: what one line of a plot has in common."""
        return tuple(pair for pair in self.settings if pair[0] != STALENESS)

    def mean(self, key: str) -> float:
        """Over the steps after the first; nan if it was never measured."""
        values = [value for step in self.steps[1:] if (value := step.get(key)) is not None]
        return sum(values) / len(values) if values else math.nan

    def points(self, key: str) -> list[tuple[float, float, float]]:
        """(step, seconds since the end of the first step, value) of every step that measured it."""
        return [
            (step["step"] or 0.0, step.get("time/since_first_step_s") or 0.0, value)
            for step in self.steps
            if (value := step.get(key)) is not None
        ]

    @property
    def improvement(self) -> float:
        """Gain of held-out accuracy from start to end; without evaluations that of the mean reward, last tenth of
        the steps against the first.
        """
        if len(self.evals) >= 2:
            return self.evals[-1][2] - self.evals[0][2]
        rewards = [value for _, _, value in self.points("reward/mean")]
        tenth = max(1, len(rewards) // 10)
        return sum(rewards[-tenth:]) / tenth - sum(rewards[:tenth]) / tenth if rewards else math.nan

    def values(self) -> dict[str, float]:
        """What the table is made of."""
        summary, num_steps, seconds = self.summary, len(self.steps), float(self.summary["seconds"])
        return {
            "is_variance": self.mean("offpolicy/is_weight_var"),
            "kl": self.mean("offpolicy/kl_behaviour_proximal_k3"),
            "ess": self.mean("offpolicy/ess"),
            "per_100_steps": 100 * self.improvement / num_steps,
            "per_minute": 60 * self.improvement / seconds if seconds else math.nan,
            "steps_per_minute": 60 * (num_steps - 1) / seconds if seconds else math.nan,
            "learner": float(summary.get("utilisation/learner", math.nan)),
            "rollout": float(summary.get("utilisation/rollout", math.nan)),
            "occupancy": float(summary.get("occupancy/rollout", math.nan)),
            "staleness_mean": float(summary["staleness_mean"] or 0.0),
            "staleness_max": float(summary["staleness_max"] or 0.0),
        }


def read_runs(folder: Path) -> list[Run]:
    """The finished cells of a sweep, or the one run of a run directory, ordered by staleness.

    Raises:
        ConfigError: it holds neither.
    """
    folders = sorted((folder / "cells").glob("*")) if (folder / "cells").is_dir() else [folder]
    runs = [run for one in folders if (run := _read_run(one)) is not None]
    if not runs:
        raise ConfigError(f"{folder} holds no finished run: no summary.json in it or in its cells")
    return sorted(runs, key=lambda run: (run.series, run.staleness, run.labels[SEED]))


def _read_run(folder: Path) -> Run | None:
    if not (folder / "summary.json").is_file():
        return None
    record = read_record(folder)
    labels = dict(record.labels) if record else {}
    if STALENESS not in labels or SEED not in labels:
        import yaml

        config = yaml.safe_load((folder / "config.yaml").read_text())
        labels.setdefault(STALENESS, str(config["staleness"]["max"]))
        labels.setdefault(SEED, str(config["run"]["seed"]))
    records = read_metrics(folder / "metrics.jsonl")
    steps = [record for record in records if "staleness/max" in record]
    at_step = {step["step"]: step.get("time/since_first_step_s") or 0.0 for step in steps}
    evals = [
        (record["step"] or 0.0, at_step.get(record["step"], 0.0), accuracy)
        for record in records
        if (accuracy := record.get("eval/accuracy")) is not None
    ]
    summary = json.loads((folder / "summary.json").read_text())
    return Run(labels, summary, steps, evals, folder)


@dataclass(frozen=True, slots=True)
class Row:
    """All seeds of one combination of settings."""

    runs: tuple[Run, ...]
    values: dict[str, list[float]]

    @property
    def staleness(self) -> int:
        return self.runs[0].staleness

    @property
    def series(self) -> tuple[tuple[str, str], ...]:
        return self.runs[0].series

    @property
    def name(self) -> str:
        """For a sentence."""
        others = ", ".join(f"{key} {label}" for key, label in self.series)
        return f"staleness {self.staleness}" + (f" ({others})" if others else "")

    def estimate(self, key: str) -> Estimate:
        """Over the seeds; of the maximum it is the maximum."""
        values = self.values[key]
        return Estimate(max(values), math.nan, len(values)) if key == "staleness_max" else estimate(values)


def rows_of(runs: Iterable[Run]) -> list[Row]:
    """A row for each combination of settings, with the wall-clock improvement: improvement per step times the
    learner's utilisation over its utilisation at staleness 0 of the same series (the smallest staleness there is).
    """
    grouped: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.settings, []).append(run)
    rows = []
    for same in grouped.values():
        of_runs = [run.values() for run in same]
        rows.append(Row(tuple(same), {key: [values[key] for values in of_runs] for key in of_runs[0]}))
    for row in rows:
        base = baseline(rows, row).estimate("learner").mean
        row.values["wall_clock"] = [
            gain * learner / base if base else math.nan
            for gain, learner in zip(row.values["per_100_steps"], row.values["learner"], strict=True)
        ]
    return rows


def baseline(rows: Sequence[Row], row: Row) -> Row:
    """Of the same series: staleness 0, or the smallest."""
    return min((other for other in rows if other.series == row.series), key=lambda other: other.staleness)


def ranked(rows: Sequence[Row]) -> list[Row]:
    """By reward per wall-clock, best first. Exact mode is left out: its utilisation is not the trade-off's."""
    counted = [row for row in rows if EXACT not in row.series and not math.isnan(_gain(row))]
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
        text += f"; the difference from the next best, {order[1].name}, {_difference_text(best, order[1])}"
    return text + "."


def _ratio_text(best: Row, base: Row) -> str:
    over, under = best.values["per_minute"], base.values["per_minute"]
    if not estimate(under).mean > 0:
        return "against nothing gained by"
    low, high = ratio_interval(over, under)
    interval = f"{low:.2f} to {high:.2f}" if math.isfinite(low) else "not bounded by these seeds"
    return f"{estimate(over).mean / estimate(under).mean:.2f} times ({CONFIDENCE:.0%} interval {interval})"


def _difference_text(best: Row, other: Row) -> str:
    comparison = welch(best.values["per_minute"], other.values["per_minute"])
    if math.isnan(comparison.p_value):
        return "can't be judged from a single seed"
    seeds = min(len(best.runs), len(other.runs))
    verdict = "is significant" if comparison.is_significant else "is not significant"
    return f"{verdict} over {seeds} seeds (Welch's t test, p = {comparison.p_value:.2g})"


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
    accuracy is the highest that all their runs reached.
    """
    order = ranked(rows)
    if not order or order[0] is (base := baseline(rows, order[0])):
        return ""
    runs = [*order[0].runs, *base.runs]
    if any(len(run.evals) < 3 for run in runs):
        return ""
    target = math.floor(100 * min(max(accuracy for _, _, accuracy in run.evals) for run in runs)) / 100
    fast, slow = ([seconds_to(run, target) or 0.0 for run in row.runs] for row in (order[0], base))
    low, high = ratio_interval(slow, fast)
    interval = f"{low:.2f} to {high:.2f}" if math.isfinite(low) else "not bounded by these seeds"
    return (
        f"Held-out accuracy {target:.2f}, which all runs of both reached, took {base.name} "
        f"{estimate(slow).text('{:.1f}')} s and {order[0].name} {estimate(fast).text('{:.1f}')} s: "
        f"{estimate(slow).mean / estimate(fast).mean:.2f} times faster ({CONFIDENCE:.0%} interval {interval})."
    )
