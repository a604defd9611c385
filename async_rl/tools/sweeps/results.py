"""Reads finished runs from their folders, and computes the values that a report shows."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.base.config.loading import read_yaml
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.run_dir import is_of_newest_end
from async_rl.base.telemetry.metrics import (
    Declaration,
    Figures,
    over_steps,
    read_declarations,
    read_metrics,
    seconds_at,
)
from async_rl.tools.sweeps.cells import (
    SEED,
    STALENESS,
    Bound,
    check_comparable,
    finished_cells,
    read_record,
)
from async_rl.tools.sweeps.efficiency import Evaluations
from async_rl.tools.sweeps.policy_curve import PolicyPoint, policy_curve

Step = dict[str, float | None]
SYSTEM_VALUES = (
    "learner", "rollout", "occupancy", "gpu_learner", "gpu_rollout", "steps_per_minute", "tokens_per_s",
    "train_s", "push_s",
)  # fmt: skip
"""The values that are not shown for runs in exact mode: there a push waits for the groups of a batch."""
KL, IS_VARIANCE = "offpolicy/kl_behaviour_proximal_k3", "offpolicy/is_weight_var"


@dataclass(frozen=True)
class Run:
    """One finished run, possibly a cell of a sweep."""

    labels: dict[str, str]
    summary: dict[str, Any]
    steps: list[Step]
    evals: list[tuple[float, float, float]]
    """(version, seconds since the end of the first step, held-out accuracy) of every evaluation. If weights
    changed while answers were sampled, the version is the mean over their tokens."""
    folder: Path
    config: dict[str, Any]
    """The resolved configuration that the run wrote."""

    @property
    def exact(self) -> bool:
        """Whether the run had staleness.mode exact. Its times say nothing about the system then."""
        return bool(self.config["staleness"]["mode"] == "exact")

    @property
    def staleness(self) -> Bound:
        return Bound.parse(self.labels[STALENESS])

    @property
    def settings(self) -> tuple[tuple[str, str], ...]:
        return tuple((key, label) for key, label in self.labels.items() if key != SEED)

    @property
    def series(self) -> tuple[tuple[str, str], ...]:
        """The labels on every axis except seed and staleness. Runs with the same series form one line of a plot."""
        return tuple(pair for pair in self.settings if pair[0] != STALENESS)

    @property
    def evaluations(self) -> Evaluations:
        return [(version, accuracy) for version, _, accuracy in self.evals]

    @cached_property
    def policy_curve(self) -> tuple[PolicyPoint, ...]:
        return policy_curve(self.steps)

    @cached_property
    def figures(self) -> Figures:
        """The figure of each metric over all steps, see async_rl/base/telemetry/metrics.py."""
        return over_steps(self.steps, self.declarations)

    @cached_property
    def declarations(self) -> dict[str, Declaration]:
        """How the run declared each metric: its reduction over steps, and its unit."""
        return read_declarations(self.folder)

    def figure(self, key: str) -> float:
        """Return the figure of the metric `key` over all steps; nan if no step measured it."""
        value = self.figures.get(key)
        return math.nan if value is None else value

    def summary_value(self, key: str) -> float:
        """Return a number of summary.json; nan if the run did not measure it."""
        value = self.summary.get(key)
        return math.nan if value is None else float(value)

    def measured(self, key: str) -> list[float]:
        """Return the values of the metric `key`, of every step that measured it."""
        return [value for step in self.steps if (value := step.get(key)) is not None]

    @property
    def improvement(self) -> float:
        """The held-out accuracy at the end minus that at the start; nan if one of them was not evaluated.

        Without evaluations, it is the mean reward of the last tenth of the steps minus the first tenth's.
        """
        if self.evals:
            return self.summary_value("accuracy_end") - self.summary_value("accuracy_start")
        rewards = self.measured("reward/mean")
        tenth = max(1, len(rewards) // 10)
        return sum(rewards[-tenth:]) / tenth - sum(rewards[:tenth]) / tenth if rewards else math.nan

    def values(self) -> dict[str, float]:
        """Return the values for the tables of a report, by name; nan for values that the run did not measure."""
        dropped, trained = (self.summary["buffer"].get(f"buffer/{name}", 0.0) for name in ("dropped_late", "trained"))
        values = {
            "is_variance": self.figure(IS_VARIANCE),
            "kl": self.figure(KL),
            "ess": self.figure("offpolicy/ess"),
            "improvement": self.improvement,
            "steps_per_minute": 60 / self.figure("time/step_s"),
            "tokens_per_s": self.figure("throughput/trained_tokens_per_s"),
            "learner": self.summary_value("utilisation/learner"),
            "rollout": self.summary_value("utilisation/rollout"),
            "occupancy": self.summary_value("occupancy/rollout"),
            "gpu_learner": self.summary_value("gpu/learner"),
            "gpu_rollout": self.summary_value("gpu/rollout"),
            "staleness_mean": self.summary_value("staleness_mean"),
            "staleness_max": self.summary_value("staleness_max"),
            "train_s": self.figure("time/train_s"),
            "push_s": self.figure("time/push_s"),
            "accuracy_start": self.summary_value("accuracy_start"),
            "accuracy_end": self.summary_value("accuracy_end"),
            "reward_mean": self.figure("reward/mean"),
            "waited_for_late": self.figure("buffer/waited_for_late_s") / self.figure("time/step_s"),
            "truncated": self.figure("offpolicy/truncated_fraction"),
            "masked": self.figure("staleness/masked_fraction"),
            "clipped_positive": self.figure("offpolicy/clip_fraction_positive"),
            "clipped_negative": self.figure("offpolicy/clip_fraction_negative"),
            "grad_norm": self.figure("policy/grad_norm"),
            "dropped": dropped / (dropped + trained) if dropped + trained else math.nan,
            "entropy_end": entropies[-1] if (entropies := self.measured("policy/entropy")) else math.nan,
        }
        return values | (dict.fromkeys(SYSTEM_VALUES, math.nan) if self.exact else {})


def read_runs(folder: Path) -> list[Run]:
    """Read the finished cells of a sweep, or the one run of a run directory. Returns them ordered by staleness.

    If the folder also has cells of an earlier sweep over other axes, these are left out.

    Raises:
        ConfigError: there is no finished run, or cells differ in more than the axes of the sweep.
    """
    if (folder / "cells").is_dir():
        plan = folder / "sweep.json"
        found = finished_cells(folder, json.loads(plan.read_text())["axes"] if plan.is_file() else None)
        check_comparable(found.items())
        runs = [read_run(cell) for cell in found]
    else:
        runs = [read_run(folder)] if (folder / "summary.json").is_file() else []
    if not runs:
        raise ConfigError(f"{folder} holds no finished run: no summary.json in it, no cell.json in its cells")
    return sorted(runs, key=lambda run: (run.series, run.staleness, run.labels[SEED]))


def read_run(folder: Path) -> Run:
    """Read the finished run in a run directory.

    Raises:
        ConfigError: the run has continued after the end described in summary.json, or a file is missing or damaged.
    """
    try:
        record = read_record(folder)
        config = read_yaml((folder / "config.yaml").read_text())[0]
        labels = dict(record.labels) if record else {}
        labels.setdefault(STALENESS, str(Bound.of_config(config["staleness"])))
        labels.setdefault(SEED, str(config["run"]["seed"]))
        records = read_metrics(folder / "metrics.jsonl")
        steps = [record for record in records if "staleness/max" in record]
        versions, ends_s = [0.0, *(step["step"] or 0.0 for step in steps)], [0.0, *seconds_at(steps)]
        evals = []
        for values in records:
            if (accuracy := values.get("eval/accuracy")) is not None:
                version = values.get("eval/mean_version", values["step"]) or 0.0
                evals.append((version, float(np.interp(version, versions, ends_s)), accuracy))
        summary = json.loads((folder / "summary.json").read_text())
        last_step = int(max((step["step"] or 0 for step in steps), default=0))
        if not is_of_newest_end(summary, last_step, folder):
            raise ConfigError(f"the run in {folder} has not ended: a report needs the summary.json of its end")
        return Run(labels, summary, steps, evals, folder, config)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the run in {folder} can't be read: config.yaml, metrics.jsonl or summary.json is missing or damaged "
            f"({type(error).__name__}: {error}). Move its folder away, or put the file back"
        ) from None
