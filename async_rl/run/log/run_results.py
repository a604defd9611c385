"""Keeps what the summary of a run tells of its rewards, evaluations and staleness, as its steps are logged."""

from __future__ import annotations

from typing import Any

from async_rl.base.telemetry.figures import SHARES, Figures
from async_rl.base.telemetry.held_out import named_results
from async_rl.run.log.run_timeline import RunTimeline

Values = dict[str, float]


class RunResults:
    """Takes the metrics of the steps and evaluations of a run, also of those before a resume."""

    def __init__(self) -> None:
        self.evals: list[tuple[int, Values]] = []
        """(version, metrics) of the first and of the last evaluation."""
        self.skipped_evals = 0
        """The number of versions whose evaluation beside training was due and is not made."""
        self.failed_groups = 0
        """The number of groups that were dropped because a reward failed."""
        self._first_reward: float | None = None
        self._last_reward: float | None = None

    def add(self, version: int, values: Values) -> None:
        """Take the metrics of a step or an evaluation."""
        if self._first_reward is None:
            self._first_reward = values.get("reward/mean")
        self._last_reward = values.get("reward/mean", self._last_reward)
        if "eval/accuracy" in values:
            self.evals[1:] = [(version, values)]

    def count_past(self, values: Values) -> None:
        """Take the counts of a step from before a resume; this process's own are counted when they are reported."""
        self.failed_groups += int(values.get("rollout/failed", 0.0))
        self.skipped_evals = max(self.skipped_evals, int(values.get("eval/skipped", 0.0)))

    def summary(self, version: int, figures: Figures, timeline: RunTimeline) -> dict[str, Any]:
        """Return these parts of the summary of a run that has ended at a version.

        Means, rates and utilisation come from async_rl/base/telemetry/figures.py, over the steps of the whole run. They
        leave out the first step of each start, which includes the warm-up; `pools` has the last start alone. A
        staleness, reward or accuracy that was not measured is None; push_ms and pause_ms are then 0.
        """
        seconds = figures.total("time/step_s")
        summary: dict[str, Any] = {
            "seconds": seconds,
            "staleness_mean": figures.get("staleness/mean"),
            "staleness_max": figures.get("staleness/max"),
            "reward_first": self._first_reward,
            "reward_last": self._last_reward,
            "reward_mean": figures.get("reward/mean"),
            "push_ms": (figures.get("time/push_s") or 0.0) * 1e3,
            "pause_ms": (figures.get("push/pause_s") or 0.0) * 1e3,
        }
        if self.skipped_evals:
            summary["skipped_evaluations"] = self.skipped_evals
        if self.failed_groups:
            summary["failed_groups"] = self.failed_groups
        if seconds > 0:
            summary |= {key: value for key, value in figures.all().items() if key.startswith(SHARES)}
            summary["pools"] = timeline.usage_of_run().shares()
            summary["episodes_per_s"] = figures.total("batch/episodes") / seconds
            summary["tokens_per_s"] = figures.get("throughput/trained_tokens_per_s") or 0.0
        return summary | self._held_out(version)

    def _held_out(self, version: int) -> dict[str, Any]:
        """Return the results of the evaluations of version 0 and of `version`; other versions do not count."""
        if not self.evals:
            return {}
        (begun, first), (evaluated, last) = self.evals[0], self.evals[-1]
        first, last = first if begun == 0 else {}, last if evaluated == version else {}
        found: dict[str, Any] = {
            f"{name}_{end}": values.get(key)
            for name, key in (("accuracy", "eval/accuracy"), ("eval_reward", "eval/reward"))
            for end, values in (("start", first), ("end", last))
        }
        of_first, of_last = named_results(first), named_results(last)
        if names := {**of_first, **of_last}:
            found["held_out"] = {name: {"start": of_first.get(name), "end": of_last.get(name)} for name in names}
        return found
