"""The driver's log of a run. It combines the reports of all processes to metrics per step, utilisation and a summary.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.watch import RULES
from async_rl.base.messages.reports import EvaluationDone, HeldOutAnswer, Report, StepDone, TrainingEnded, WorkerReport
from async_rl.base.run_dir.checkpoints import (
    checkpoint_before,
    list_checkpoints,
    prune,
    resumed_training_state,
)
from async_rl.base.run_dir.run_dir import write_config
from async_rl.base.telemetry.certificate import certificate
from async_rl.base.telemetry.metrics import (
    TIME,
    TOKENS,
    Figures,
    Metric,
    folded,
    read_metrics,
    trained_tokens,
    with_intervals,
)
from async_rl.base.telemetry.metrics_logger import MetricsLogger, named_results
from async_rl.base.telemetry.timeline import RESTART, Span
from async_rl.run.log.run_timeline import RunTimeline
from async_rl.run.processes.signals import StepListener
from async_rl.run.watch.watcher import Finding, Watcher, limits_of

Values = dict[str, float]
SHARES = ("utilisation/", "occupancy/", "gpu/")
"""The prefixes of metrics that say how busy the pools were."""
MOST_METRICS = 2**16
"""The most metrics that are stored separately until a step ends. Beyond that, metrics with one key are combined.
Workers report twice a second, even while a pause stops the learner for days."""


@dataclass(frozen=True, slots=True)
class _OpenStep:
    """A step that is not logged yet. Its times are from the driver's clock."""

    report: StepDone
    end_s: float
    arrived_s: float


class RunLog:
    """Collects the reports of all processes in the driver, and logs each step when it is complete.

    A step's record has the learner's metrics of the step, and the metrics that rollout workers reported since the last
    record. It is written when every learner rank has reported the step and every rollout pool has reported spans beyond
    the step's end, which its utilisation needs; it waits for that at most timeouts.silent_s. Spans and samples that
    arrive later are only in timeline.json.
    """

    def __init__(self, config: Config, on_step: StepListener = lambda version, metrics: None) -> None:
        self.run_dir = config.run_dir
        self._on_step = on_step
        self._evals_to_tell: Values = {}
        """The metrics of the evaluations that ended since `on_step` was called last."""
        self._config = config
        self.logger = MetricsLogger(config, config.run_dir)
        self.timeline = RunTimeline(self.run_dir)
        self.results = RunResults()
        self.version = 0
        """The policy version of the last step that was logged."""
        self.ended = ""
        """The reason for which training ended before run.steps; empty if it did not."""
        self.has_begun = False
        """Whether the run has made a step or come to its end. Until then a resume may be undone."""
        self._best_values: dict[int, float] = {}
        """The value of what checkpoint.best_by names, by policy version."""
        self._restored: list[dict[str, float | None]] = []
        """The records of steps that the run had trained but not logged before it was resumed, until the first step."""
        accepted: set[str] = set()
        if config.run.resume:
            from async_rl.base.run_dir.watch_events import accepted_rules

            accepted = accepted_rules(self.run_dir)
        self.watcher = Watcher(limits_of(config), config.rollout.group_size, config.eval.every_steps, accepted)
        if saved := resumed_training_state(config):
            self.version = saved.version
            past = read_metrics(self.run_dir / "metrics.jsonl")
            self._find_unlogged(past)
            for record in past:
                known = {key: value for key, value in record.items() if value is not None}
                self._note_values(int(known["step"]), known)
                self.results.count_past(known)
        self._finding: Finding | None = None
        """The finding in the step or evaluation that is being logged."""
        self._troubles = deque[Finding]()
        """Findings of trouble that the driver has not acted on yet, oldest first."""
        self.kept_checkpoints: set[int] = set()
        """Versions whose checkpoints are kept, because the watch or a person may send the run back to them."""
        self.end_reason = ""
        """The reason for which the driver stopped the learner; empty if it did not."""
        self._pending: list[_OpenStep] = []
        """The steps of learner/0 that are not logged yet."""
        self._since_step: list[Metric] = []
        self._reported_until_s = {name: 0.0 for name in config.server_names if name.startswith("rollout")}
        """For each rollout server that is there: the end of its newest span. A step is logged once all have reported.
        """
        self._lost_s: dict[str, float] = {}
        """For each lost rollout process that has not returned: time.monotonic() at its loss."""
        self._reported_steps = {f"learner/{rank}": 0 for rank in range(config.placement.learner.ranks)}

    def _find_unlogged(self, past: list[dict[str, float | None]]) -> None:
        """Find the steps up to the checkpoint that were trained but not logged before the resume, and print them.

        Args:
            past: the records of metrics.jsonl.
        """
        from async_rl.base.run_dir.resuming import missing_steps, numbers_text, restored_records

        missing = missing_steps(past, self.version)
        self._restored = restored_records(Path(self._config.run.resume), missing, past)
        restored = [int(record["step"] or 0) for record in self._restored]
        if restored:
            self.logger.note(
                f"step {numbers_text(restored)}: trained but not logged before the run ended. The metrics are those in "
                "the checkpoint, without utilisation and what the rollout workers measured"
            )
        if lost := [step for step in missing if step not in restored]:
            self.logger.note(f"step {numbers_text(lost)}: not logged before the run ended; no file has the metrics")

    def _note_values(self, version: int, values: Values) -> Values:
        """Store the metrics of a step or an evaluation that the summary and the choice of checkpoints need.

        Returns the metrics `alarm/<rule>`, 1 or 0, of the rules that were checked.
        """
        self.results.add(version, values)
        if "eval/accuracy" in values:
            self._best_values[version] = values[f"eval/{self._config.checkpoint.best_by}"]
        found = self._finding = self.watcher.add(version, values)
        states = found.states if found else {}
        return self.logger.reduce([Metric(f"alarm/{name}", float(is_on), "max") for name, is_on in states.items()])

    def _tell_findings(self) -> None:
        """Print which alarms began or ended with the step or evaluation that was logged last."""
        found, self._finding = self._finding, None
        if found is None:
            return
        for name in found.new:
            self.logger.alarm(f"ALARM at step {found.version}: {found.text([name])}. {RULES[name].advice}.")
        for name, since in found.over.items():
            self.logger.note(f"step {found.version}: the alarm {name}, on since step {since}, is over")
        if found.trouble and self._config.watch.acts:  # several steps may be logged before one is acted on
            self._troubles.append(found)

    def take_trouble(self) -> Finding | None:
        """Return the oldest trouble that was not returned before, and None if there is none.

        Accepted trouble is skipped.

        Trouble is accepted if a person has accepted all of its rules since.
        """
        while self._troubles:
            found = self._troubles.popleft()
            if not self.watcher.accepted.issuperset(found.trouble):
                return found
        return None

    def _prune(self) -> None:
        needed: set[int | None] = {*self.kept_checkpoints}
        if self._config.watch.acts:
            needed |= self.watcher.needed(list_checkpoints(self.run_dir))
        needed |= {checkpoint_before(self.run_dir, trouble.back_to) for trouble in self._troubles}
        prune(self.run_dir, self._config.checkpoint, self._best_values, needed)

    def add(self, process: str, report: Report) -> None:
        """Add a report of `process`, and log the steps that are complete with it."""
        match report:
            case StepDone():
                spans = self.timeline.add(report)
                self._reported_steps[process] = report.version
                if process == "learner/0":
                    end_s = max((span.end_s for span in spans if span.pool == process), default=0.0)
                    self._pending.append(_OpenStep(report, end_s, time.monotonic()))
            case TrainingEnded():
                self.timeline.add(report)
                if process == "learner/0":
                    self.ended = self.end_reason or report.reason
                    if not report.is_stop:
                        self.begin_lineage()
                    last = f"step {report.version} was the last"
                    self.logger.note(f"training ends: {report.reason or last}")
                    if report.metrics:
                        self.logger.log_late(report.version, report.metrics)
            case WorkerReport():
                spans = self.timeline.add(report)
                self.add_metrics(report.metrics)
                self.results.failed_groups += sum(int(m.value) for m in report.metrics if m.key == "rollout/failed")
                for text in report.notes:
                    self.logger.note(text)
                newest_s = max((span.end_s for span in spans), default=0.0)
                waited_for = self._reported_until_s.get(process)
                is_back = process.startswith("rollout") and newest_s >= (self.timeline.step_ends_s or [0.0])[-1]
                if waited_for is not None or is_back:
                    self._reported_until_s[process] = max(waited_for or 0.0, newest_s)
        self._close_steps()

    def add_metrics(self, metrics: Sequence[Metric]) -> None:
        """Add metrics of the driver or a worker to the next logged step."""
        self._since_step.extend(metrics)
        if len(self._since_step) > MOST_METRICS:
            self._since_step = folded(self._since_step)

    def lost(self, process: str) -> None:
        """Called when a server has died: steps are logged without its spans until it reports again."""
        self._reported_until_s.pop(process, None)
        self._lost_s.setdefault(process, time.monotonic())
        self._close_steps()

    def restarted(self, process: str, version: int | None) -> None:
        """Print that a server is back, and add its downtime to the timeline.

        Args:
            version: the version of its weights; None: it has no weights of the learner yet, or never gets any.
        """
        weights = f", with the weights of version {version}" if version is not None else ""
        self.logger.note(f"{process} is back{weights}")
        if lost_s := self._lost_s.pop(process, None):
            self.timeline.add_spans([Span(process, "other", lost_s, time.monotonic(), RESTART)])

    def joined(self, process: str) -> None:
        """Called when a server begins to serve: its time counts from now on, unless it does already."""
        self.timeline.joined(process)

    def left(self, process: str) -> None:
        """Called when a server has left with its resources: its time counts no more until it joins again."""
        self._lost_s.pop(process, None)
        self.timeline.left(process)

    def close_overdue(self) -> None:
        """Log the steps that have waited timeouts.silent_s for reports, without these reports, and print that.

        Later steps don't wait for the late rollout process until its reports have caught up.
        """
        limit_s = self._config.timeouts.silent_s
        while self._pending and time.monotonic() - self._pending[0].arrived_s > limit_s:
            step = self._pending[0]
            behind = {n: step.end_s - until_s for n, until_s in self._reported_until_s.items() if until_s < step.end_s}
            behind |= {n: 0.0 for n, version in self._reported_steps.items() if version < step.report.version}
            names = ", ".join(f"{n} ({by_s:.0f} s behind)" if by_s else n for n, by_s in sorted(behind.items()))
            self.logger.note(
                f"step {step.report.version} is logged without all that {names} did in it: for {limit_s:.0f} s "
                "(timeouts.silent_s) no report of it has reached the step's end. The run goes on"
            )
            for name in behind:
                self._reported_until_s.pop(name, None)
            self._close_step(self._pending.pop(0))
            self._close_steps()

    @property
    def has_open_steps(self) -> bool:
        """Whether a step is not logged yet, because some process has not sent its report."""
        return bool(self._pending)

    def add_eval(self, *reports: EvaluationDone) -> None:
        """Log the metrics of an evaluation as a separate record, and prune all but the best checkpoints.

        Args:
            reports: the reports of all parts of the evaluation.
        """
        for report in reports:
            self.timeline.add(report)
        values = self.logger.reduce([m for report in reports for m in report.metrics if m.key.startswith("eval/")])
        if values:
            version = reports[0].version
            values = with_intervals(values, self.logger.reduce)
            values |= self._note_values(version, values)
            self.results.add_answers(version, [answer for report in reports for answer in report.answers])
            self._prune()
            self.logger.log_eval(version, values)
            self._tell_findings()
            self._evals_to_tell |= values

    def skipped_eval(self, version: int, reason: str) -> None:
        """Print and count that the due evaluation of a version is skipped."""
        self.results.skipped_evals += 1
        self.logger.note(f"version {version} is not evaluated: {reason}")
        self.add_metrics([Metric("eval/skipped", float(self.results.skipped_evals), "last")])

    def _close_steps(self) -> None:
        while self._pending:
            step = self._pending[0]
            if step.report.version > min(self._reported_steps.values()):
                return
            if step.end_s > min(self._reported_until_s.values(), default=float("inf")):
                return
            self._close_step(self._pending.pop(0))

    def _close_step(self, step: _OpenStep) -> None:
        report, end_s = step.report, step.end_s
        since_step, self._since_step = self._since_step, []
        is_first = not self.timeline.step_ends_s
        if not is_first:
            end_s = max(end_s, self.timeline.step_ends_s[-1])
        usage, step_ends_s = self.timeline.end_step(end_s), self.timeline.step_ends_s
        since_first = Metric("time/since_first_step_s", end_s - step_ends_s[0], "last", unit="s")
        values = self.logger.reduce([*report.metrics, *since_step, *usage.metrics(), since_first])
        if not is_first and end_s > step_ends_s[-2]:
            values[TIME] = end_s - step_ends_s[-2]
        if (step_s := values.get(TIME)) and TOKENS in values:
            rate = Metric("throughput/trained_tokens_per_s", trained_tokens(values) / step_s, by=TIME, unit="tokens/s")
            values |= self.logger.reduce([rate])
        self.version = report.version
        if is_first:
            self.timeline.first_step = report.version
            self.begin_lineage()
        values |= self._note_values(report.version, values)
        self._prune()
        self.logger.log(report.version, values, report.examples)
        self._tell_findings()
        evals, self._evals_to_tell = self._evals_to_tell, {}
        self._on_step(report.version, values | evals)

    def begin_lineage(self) -> None:
        """Make a resume final, so that it is not undone any more.

        Logs the steps that were trained but not logged before it.
        """
        self.has_begun = True
        write_config(self._config)
        self.logger.begin_lineage()
        while self._restored:
            self.logger.log_restored(self._restored.pop(0))

    def close(self) -> None:
        """Log the remaining steps, complete and plot timeline.json, and close everything. Also called after a crash."""
        with contextlib.closing(self.logger), contextlib.closing(self.timeline):
            while self._pending:
                self._close_step(self._pending.pop(0))
            self._prune()

    def summary(self, buffer_counters: Values) -> dict[str, Any]:
        """Return the content of summary.json.

        Args:
            buffer_counters: the buffer's last counters.
        """
        resumes = 0
        if self._config.run.resume:
            from async_rl.base.run_dir.resuming import kept_resumes

            resumes = kept_resumes(self.run_dir)
        summary: dict[str, Any] = {
            "run_dir": str(self.run_dir),
            "steps": self.version,
            "resumes": resumes,
            **self.results.summary(self.version, self.logger.figures, self.timeline),
            "buffer": buffer_counters,
        }
        summary["certificate"] = [asdict(axis) for axis in certificate(self.logger.figures.all())]
        if self.ended:
            summary["ended"] = self.ended
        if alarms := self.watcher.sentence():
            summary["alarms"] = alarms
        return summary


class RunResults:
    """Collects the results of a run from the metrics of its steps and evaluations, including those before a resume."""

    def __init__(self) -> None:
        self.evals: list[tuple[int, Values]] = []
        """(version, metrics) of the first and of the last evaluation."""
        self._answers: dict[int, Sequence[HeldOutAnswer]] = {}
        """By version, the answers of the evaluations of this process: of version 0, and of the last one."""
        self.skipped_evals = 0
        """The number of versions whose evaluation beside training was due and is not made."""
        self.failed_groups = 0
        """The number of groups that were dropped because a reward failed."""
        self._first_reward: float | None = None
        self._last_reward: float | None = None

    def add(self, version: int, values: Values) -> None:
        """Add the metrics of a step or an evaluation."""
        if self._first_reward is None:
            self._first_reward = values.get("reward/mean")
        self._last_reward = values.get("reward/mean", self._last_reward)
        if "eval/accuracy" in values:
            self.evals[1:] = [(version, values)]

    def add_answers(self, version: int, answers: Sequence[HeldOutAnswer]) -> None:
        """Keep the answers of an evaluation, if it is the first or the last one."""
        self._answers = {0: self._answers.get(0, ()), version: answers}

    def count_past(self, values: Values) -> None:
        """Add the counts in the record of a step before a resume.

        The counts of this process are added when they are reported.
        """
        self.failed_groups += int(values.get("rollout/failed", 0.0))
        self.skipped_evals = max(self.skipped_evals, int(values.get("eval/skipped", 0.0)))

    def summary(self, version: int, figures: Figures, timeline: RunTimeline) -> dict[str, Any]:
        """Return the part of summary.json that has rewards, accuracy, staleness, durations, rates and utilisation.

        Means, rates and utilisation are figures over the steps of the whole run (async_rl/base/telemetry/metrics.py).
        They leave out the first step of each start, which includes the warm-up. `pools` covers only the time since the
        last start. If staleness, reward or accuracy was not measured, it is None; push_ms and pause_ms are 0 instead.

        Args:
            version: the last version.
            figures: the figures of the metrics.
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
        """Return the results of the evaluations of version 0 and of `version`, the last one, as far as they were made.
        """
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
        if example := self._example(version):
            found["example"] = example
        return found

    def _example(self, version: int) -> dict[str, Any]:
        """Return the held-out question whose reward rose most, with its answers by version 0 and by the last version.

        Returns {} if there are no answers of both versions.
        """
        before = {each.question: each for each in self._answers.get(0, ())}
        after = self._answers.get(version, ()) if version else ()
        pairs = [(before[each.question], each) for each in after if each.question in before]
        if not pairs:
            return {}
        old, new = max(pairs, key=lambda pair: pair[1].reward - pair[0].reward)
        return {
            "question": new.question, "before": old.answer, "after": new.answer,
            "reward_before": old.reward, "reward_after": new.reward, "chosen_from": len(pairs),
        }
