"""Everything the processes report, merged in one place: metrics per step, utilisation, the run's summary."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from async_rl.checkpoints import lineage_of, prune, resumed_cut
from async_rl.config import Config
from async_rl.lanes import draw_lanes
from async_rl.metrics import Metric, MetricsLogger, Report, read_metrics, reduce_metrics
from async_rl.timeline import Sample, Span, sampled, shares, utilisation, write_chrome_trace

Values = dict[str, float]
RECENT_SAMPLES = 1000
"""A step looks for its samples among so many of the last: it closes within a second of its end."""


class RunLog:
    """Collects Reports in the driver.

    A step's record holds the learner's metrics of that step and what the rollout workers reported since the last one.
    It is written once every rollout pool has reported beyond the step's end: its utilisation needs their spans.
    """

    def __init__(self, config: Config) -> None:
        self.run_dir = config.run_dir
        self._checkpoint = config.checkpoint
        self.logger = MetricsLogger(config, config.run_dir)
        self.spans: list[Span] = []
        self.samples: list[Sample] = []
        self.steps: list[Values] = []
        self.evals: list[tuple[int, Values]] = []
        self.step_ends_s: list[float] = []
        self.version = 0
        """Of the last step that was logged."""
        self.ended = ""
        """Why the run ended before its last step."""
        self._best_values: dict[int, float] = {}
        """checkpoint.best_metric by version."""
        self._first_reward: float | None = None
        self._resumes = 0
        if cut := resumed_cut(config):
            self.version, self._resumes = cut.version, lineage_of(self.run_dir)
            self._remember(read_metrics(self.run_dir / "metrics.jsonl"))
        self._recent: list[Span] = []
        self._pending: list[tuple[Report, float]] = []
        self._from_workers: list[Metric] = []
        self._reported_until_s = {f"rollout/{i}": 0.0 for i in range(config.placement.rollout.servers)}

    def _remember(self, records: Sequence[Mapping[str, float | None]]) -> None:
        """What the summary and the choice of checkpoints need of the steps before a resume."""
        for record in records:
            values = {key: value for key, value in record.items() if value is not None}
            self._note_values(int(values["step"]), values)
            if "eval/accuracy" in values:
                self.evals.append((int(values["step"]), values))

    def _note_values(self, version: int, values: Mapping[str, float]) -> None:
        if self._first_reward is None:
            self._first_reward = values.get("reward/mean")
        if self._checkpoint.best_metric in values:
            self._best_values[version] = values[self._checkpoint.best_metric]
        prune(self.run_dir, self._checkpoint, self._best_values)

    def add(self, process: str, report: Report) -> None:
        self._add_spans(report)
        for text in report.alarms:
            self.logger.alarm(text)
        if report.note and process == "learner/0":
            self.ended = report.note
            self.logger.note(report.note)
            if report.metrics:
                self.logger.log_late(report.step, reduce_metrics(report.metrics))
        elif process == "learner/0" and report.metrics:  # of a step
            end_s = max((s.end_s for s in report.spans if s.pool == process), default=0.0)
            self._pending.append((report, end_s))
        elif process.startswith("rollout/"):
            self._from_workers.extend(report.metrics)
            newest_s = max((span.end_s for span in report.spans), default=0.0)
            self._reported_until_s[process] = max(self._reported_until_s.get(process, 0.0), newest_s)
        self._close_steps()

    def lost(self, process: str) -> None:
        """A rollout process died: no step waits for it until it reports again."""
        self._reported_until_s.pop(process, None)
        self._close_steps()

    @property
    def has_open_steps(self) -> bool:
        """Whether a step waits for the rollout pools' spans."""
        return bool(self._pending)

    def add_eval(self, report: Report) -> None:
        """An evaluation the driver asked for, outside any step."""
        self._add_spans(report)
        values = reduce_metrics(m for m in report.metrics if m.key.startswith("eval/"))
        if values:
            self.evals.append((report.step, values))
            self._note_values(report.step, values)
            self.logger.log_eval(report.step, values)

    def _add_spans(self, report: Report) -> None:
        self.spans.extend(report.spans)
        self.samples.extend(report.samples)
        self._recent.extend(report.spans)

    def _close_steps(self) -> None:
        while self._pending and self._pending[0][1] <= min(self._reported_until_s.values(), default=float("inf")):
            self._close_step(*self._pending.pop(0))

    def _close_step(self, report: Report, end_s: float) -> None:
        values = reduce_metrics([*report.metrics, *self._from_workers])
        self._from_workers.clear()
        if self.step_ends_s:
            values.update(utilisation(self._recent, self.step_ends_s[-1], end_s))
            values.update(sampled(self.samples[-RECENT_SAMPLES:], self.step_ends_s[-1], end_s))
            self._recent = [span for span in self._recent if span.end_s > end_s]
        self.step_ends_s.append(end_s)
        values["time/since_first_step_s"] = end_s - self.step_ends_s[0]
        self.steps.append(values)
        self.version = report.step
        self._note_values(report.step, values)
        self.logger.log(report.step, values)

    def window(self) -> tuple[float, float]:
        """What utilisation and throughput are measured over: start-up and the first step are outside."""
        if len(self.step_ends_s) < 2:
            return (0.0, 0.0)
        return self.step_ends_s[0], self.step_ends_s[-1]

    def close(self) -> None:
        """Log the open steps, write timeline.json, end the logger; after a crash too, for what there was."""
        with contextlib.closing(self.logger):
            while self._pending:
                self._close_step(*self._pending.pop(0))
            prune(self.run_dir, self._checkpoint, self._best_values)
            write_chrome_trace(self.spans, self.run_dir / "timeline.json", self.samples)
            draw_lanes(self.spans, self.step_ends_s, self.run_dir / "timeline.png")

    def summary(self, buffer_counters: Values) -> dict[str, Any]:
        """What the run came to; a value that was not measured is left out or None."""
        start_s, end_s = self.window()
        counted = self.steps[1:]

        def total(key: str) -> float:
            return sum(step.get(key, 0.0) for step in counted)

        def mean(key: str) -> float | None:
            present = [step[key] for step in counted if key in step]
            return sum(present) / len(present) if present else None

        summary: dict[str, Any] = {
            "steps": self.version,
            "resumes": self._resumes,
            "seconds": end_s - start_s,
            "staleness_mean": mean("staleness/mean"),
            "staleness_max": max((s.get("staleness/max", 0.0) for s in self.steps), default=None),
            "reward_first": self._first_reward,
            "reward_last": self.steps[-1].get("reward/mean") if self.steps else None,
            "push_ms": (mean("time/push_s") or 0.0) * 1e3,
            "pause_ms": (mean("push/pause_s") or 0.0) * 1e3,
            "buffer": buffer_counters,
        }
        if self.ended:
            summary["ended"] = self.ended
        if end_s > start_s:
            summary |= utilisation(self.spans, start_s, end_s)
            summary |= sampled(self.samples, start_s, end_s)
            pools = sorted({span.pool for span in self.spans})
            summary["pools"] = {pool: shares(self.spans, pool, start_s, end_s) for pool in pools}
            summary["rollouts_per_s"] = total("batch/rollouts") / (end_s - start_s)
            summary["tokens_per_s"] = total("batch/response_tokens") / (end_s - start_s)
        if self.evals:
            summary["accuracy_start"] = self.evals[0][1].get("eval/accuracy")
            summary["accuracy_end"] = self.evals[-1][1].get("eval/accuracy")
        return summary
