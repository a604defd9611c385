"""Reads finished runs from their folders, computes the values of each, and gathers the seeds of a setting in a row."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from async_rl.errors import ConfigError
from async_rl.sweeps.cells import SEED, STALENESS, check_comparable, finished_cells, read_record
from async_rl.sweeps.statistics import Estimate, estimate
from async_rl.telemetry.figures import Figures, over_steps
from async_rl.telemetry.metrics import read_metrics

Step = dict[str, float | None]
SYSTEM_VALUES = (
    "learner", "rollout", "occupancy", "gpu_learner", "gpu_rollout", "steps_per_minute", "tokens_per_s", "per_minute",
    "train_s", "push_s",
)  # fmt: skip
"""The values that are left out in exact mode, where a push waits for the groups of a batch."""


@dataclass(frozen=True)
class Run:
    """One finished run, which may be a cell of a sweep."""

    labels: dict[str, str]
    summary: dict[str, Any]
    steps: list[Step]
    evals: list[tuple[float, float, float]]
    """(version, seconds since the end of the first step, held-out accuracy) of every evaluation. If weights changed
    while answers were sampled, the version is the newest one that answered."""
    folder: Path
    exact: bool = False
    """Whether the run had staleness.mode=exact, so that its times say nothing about the system."""

    @property
    def staleness(self) -> int:
        return int(self.labels[STALENESS])

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        return tuple((key, label) for key, label in self.labels.items() if key != SEED)

    @property
    def series(self) -> tuple[tuple[str, str], ...]:
        """The labels on every axis but seed and staleness. Runs with the same series are one line of a plot."""
        return tuple(pair for pair in self.settings if pair[0] != STALENESS)

    @cached_property
    def figures(self) -> Figures:
        """The figure of each metric over the steps, see async_rl/telemetry/figures.py."""
        return over_steps(self.steps)

    def figure(self, key: str) -> float:
        """Return the figure of the metric `key` over the steps; nan if none has measured it."""
        value = self.figures.get(key)
        return math.nan if value is None else value

    def points(self, key: str, first: int = 0) -> list[tuple[float, float, float]]:
        """Return (step, seconds since the end of the first step, value) of every step that measured metric `key`."""
        return [
            (step.get("step") or 0.0, step.get("time/since_first_step_s") or 0.0, value)
            for step in self.steps[first:]
            if (value := step.get(key)) is not None
        ]

    @property
    def improvement(self) -> float:
        """The held-out accuracy at the end minus at the start.

        Without evaluations, it is the mean reward of the last tenth of the steps minus that of the first tenth.
        """
        if len(self.evals) >= 2:
            return self.evals[-1][2] - self.evals[0][2]
        rewards = [value for _, _, value in self.points("reward/mean")]
        tenth = max(1, len(rewards) // 10)
        return sum(rewards[-tenth:]) / tenth - sum(rewards[:tenth]) / tenth if rewards else math.nan

    def values(self) -> dict[str, float]:
        """Return the values for the tables of a report by name; nan if the run did not measure a value."""
        summary, num_steps, seconds = self.summary, len(self.steps), float(self.summary["seconds"])
        dropped = summary["buffer"].get("buffer/dropped_late", 0.0)
        values = {
            "is_variance": self.figure("offpolicy/is_weight_var"),
            "kl": self.figure("offpolicy/kl_behaviour_proximal_k3"),
            "ess": self.figure("offpolicy/ess"),
            "per_100_steps": 100 * self.improvement / num_steps,
            "per_minute": 60 * self.improvement / seconds if seconds else math.nan,
            "steps_per_minute": 60 / self.figure("time/step_s"),
            "tokens_per_s": self.figure("throughput/trained_tokens_per_s"),
            "learner": float(summary.get("utilisation/learner", math.nan)),
            "rollout": float(summary.get("utilisation/rollout", math.nan)),
            "occupancy": float(summary.get("occupancy/rollout", math.nan)),
            "gpu_learner": float(summary.get("gpu/learner", math.nan)),
            "gpu_rollout": float(summary.get("gpu/rollout", math.nan)),
            "staleness_mean": float(summary["staleness_mean"] or 0.0),
            "staleness_max": float(summary["staleness_max"] or 0.0),
            "train_s": self.figure("time/train_s"),
            "push_s": self.figure("time/push_s"),
            "accuracy_start": self.evals[0][2] if self.evals else math.nan,
            "accuracy_end": self.evals[-1][2] if self.evals else math.nan,
            "reward_mean": self.figure("reward/mean"),
            "truncated": self.figure("offpolicy/truncated_fraction"),
            "masked": self.figure("staleness/masked_fraction"),
            "dropped": dropped / max(1.0, dropped + summary["buffer"].get("buffer/trained", 0.0)),
            "entropy_end": entropies[-1][2] if (entropies := self.points("policy/entropy")) else math.nan,
        }
        return values | (dict.fromkeys(SYSTEM_VALUES, math.nan) if self.exact else {})


def read_runs(folder: Path) -> list[Run]:
    """Read and return the finished cells of a sweep, or the one run of a run directory, ordered by staleness.

    Cells of an earlier sweep over other axes in the same folder are left out.

    Raises:
        ConfigError: there is no finished run, or cells differ in more than the axes of the sweep.
    """
    if (folder / "cells").is_dir():
        plan = folder / "sweep.json"
        found = finished_cells(folder, json.loads(plan.read_text())["axes"] if plan.is_file() else None)
        check_comparable(found.items())
        runs = [_read_run(cell) for cell in found]
    else:
        runs = [_read_run(folder)] if (folder / "summary.json").is_file() else []
    if not runs:
        raise ConfigError(f"{folder} holds no finished run: no summary.json in it, no cell.json in its cells")
    return sorted(runs, key=lambda run: (run.series, run.staleness, run.labels[SEED]))


def _read_run(folder: Path) -> Run:
    record = read_record(folder)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    labels = dict(record.labels) if record else {}
    labels.setdefault(STALENESS, str(config["staleness"]["max"]))
    labels.setdefault(SEED, str(config["run"]["seed"]))
    records = read_metrics(folder / "metrics.jsonl")
    steps = [record for record in records if "staleness/max" in record]
    at_step = {step["step"]: step.get("time/since_first_step_s") or 0.0 for step in steps}
    evals = []
    for values in records:
        if (accuracy := values.get("eval/accuracy")) is not None:
            newest = values.get("eval/newest_version")
            version = newest if newest in at_step else values["step"]
            evals.append((version or 0.0, at_step.get(version, 0.0), accuracy))
    summary = json.loads((folder / "summary.json").read_text())
    return Run(labels, summary, steps, evals, folder, config["staleness"]["mode"] == "exact")


@dataclass(frozen=True, slots=True)
class Setting:
    """The runs with one combination of settings, one for each seed. `values` has, by name, a value of each run."""

    runs: tuple[Run, ...]
    values: dict[str, list[float]]

    @property
    def staleness(self) -> int:
        return self.runs[0].staleness

    @property
    def series(self) -> tuple[tuple[str, str], ...]:
        return self.runs[0].series

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


def settings_of(runs: Iterable[Run]) -> list[Setting]:
    """Return a row for each combination of settings, with the wall-clock improvement added to its values.

    Wall-clock improvement is the improvement per 100 steps, times the learner's utilisation over its utilisation at
    the smallest staleness of the same series.
    """
    grouped: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        grouped.setdefault(run.settings, []).append(run)
    rows = []
    for same in grouped.values():
        of_runs = [run.values() for run in same]
        rows.append(Setting(tuple(same), {key: [values[key] for values in of_runs] for key in of_runs[0]}))
    for row in rows:
        base = baseline(rows, row).estimate("learner").mean
        row.values["wall_clock"] = [
            gain * learner / base if base else math.nan
            for gain, learner in zip(row.values["per_100_steps"], row.values["learner"], strict=True)
        ]
    return rows


def baseline(rows: Sequence[Setting], row: Setting) -> Setting:
    return min((other for other in rows if other.series == row.series), key=lambda other: other.staleness)
