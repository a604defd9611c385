"""The spans and samples of all processes of a run: the utilisation of steps and of the run, and timeline.json."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from async_rl.base.messages.reports import TimedReport
from async_rl.base.telemetry.plots import plot_timeline
from async_rl.base.telemetry.timeline import JOINED, LEFT, ChromeTrace, HostClocks, Sample, Span, Usage

MOST_SAMPLES = 2**16
"""If more samples are in memory, for example while a pause stops the learner for days, each pool's are thinned out."""


class RunTimeline:
    """Keeps the spans of the last two steps, and writes older ones to timeline.json."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._trace = ChromeTrace(run_dir / "timeline.json", time.monotonic())
        self.step_ends_s: list[float] = []
        """The ends of the logged steps, in times of the driver's clock."""
        self.first_step = 1
        """The number of the first of them; a resumed run goes on from a later one."""
        self._usage = Usage()
        """The utilisation from the end of the first step to the end of the last but one."""
        self._recent: dict[str, list[Span]] = {}
        """For each pool: the spans that ended after the last step but one. Adjacent spans of one state are merged.
        A pool without spans is kept, because its server is lost and may return."""
        self._there: dict[str, list[tuple[float, float]]] = {}
        """For each server's pool: the times from joining to leaving. The last one may be open, with infinity."""
        self._samples: list[Sample] = []
        """Samples taken after the end of the last step but one."""
        self._sample_gap_s = 0.0
        """The least time between two samples of one pool and name; closer samples are dropped. 0: every one is kept."""
        self._sampled_s: dict[tuple[str, str], float] = {}
        """The time of the newest sample that was kept, by (pool, name)."""
        self._clocks = HostClocks()

    def joined(self, pool: str) -> None:
        """Record that a pool is there from now on, unless it is already."""
        there = self._there.setdefault(pool, [])
        if not there or there[-1][1] < math.inf:
            there.append((time.monotonic(), math.inf))
            self._trace.mark(pool, JOINED, there[-1][0])

    def left(self, pool: str) -> None:
        """Record that a pool is there no more."""
        there = self._there.setdefault(pool, [])
        if there and there[-1][1] == math.inf:
            there[-1] = (there[-1][0], time.monotonic())
            self._trace.mark(pool, LEFT, there[-1][1])

    def add(self, report: TimedReport) -> list[Span]:
        """Add the spans and samples of a report. Returns the spans with times of the driver's clock."""
        shift_s = self._clocks.behind_s(report.clock, report.sent_s)
        spans = [replace(s, start_s=s.start_s + shift_s, end_s=s.end_s + shift_s) for s in report.spans]
        self.add_spans(spans)
        self._add_samples([replace(sample, time_s=sample.time_s + shift_s) for sample in report.samples])
        if len(self._samples) > MOST_SAMPLES:
            self._sample_gap_s = 2 * self._sample_gap_s or 1.0
            samples, self._samples = self._samples, []
            self._sampled_s.clear()
            self._add_samples(samples)
        return spans

    def add_spans(self, spans: Sequence[Span]) -> None:
        """Add spans with times of the driver's clock. Adjacent spans with the same state are merged."""
        for span in spans:
            recent = self._recent.setdefault(span.pool, [])
            last = recent[-1] if recent else None
            if last and (last.state, last.name, last.end_s) == (span.state, span.name, span.start_s):
                recent[-1] = replace(last, end_s=span.end_s)
            else:
                recent.append(span)

    def end_step(self, end_s: float) -> Usage:
        """Record that a step ended at `end_s`, by the driver's clock. Returns its utilisation.

        For the first step it is empty, because the step's beginning is not known.
        """
        if self.step_ends_s:
            self._add_last_step(self._usage)
            self._write_trace(self.step_ends_s[-1])
        self.step_ends_s.append(end_s)
        return self._add_last_step(Usage())

    def usage_of_run(self) -> Usage:
        """Return the utilisation from the end of the first step to the end of the last."""
        return self._add_last_step(copy.deepcopy(self._usage))

    def close(self) -> None:
        """Complete timeline.json, and plot it."""
        with contextlib.closing(self._trace):
            usage = self.usage_of_run()
            self._write_trace(float("inf"))
            busy = {pool: shares["busy"] for pool, shares in usage.shares().items()}
            clock, now_s = self._trace.clock_s, time.monotonic()
            ends_s = [clock(end_s) for end_s in self.step_ends_s]
            there = {
                pool: [(clock(from_s), clock(min(to_s, now_s))) for from_s, to_s in windows]
                for pool, windows in self._there.items()
            }
            path = self._run_dir / "timeline.png"
            plot_timeline(self._trace.spans(), busy, ends_s, path, self.first_step, there)

    def _add_samples(self, samples: Sequence[Sample]) -> None:
        """Add samples, without those that follow too soon after the last sample with the same pool and name."""
        for sample in samples:
            key = (sample.pool, sample.name)
            if not self._sample_gap_s or sample.time_s >= self._sampled_s.get(key, -math.inf) + self._sample_gap_s:
                self._sampled_s[key] = sample.time_s
                self._samples.append(sample)

    def _add_last_step(self, usage: Usage) -> Usage:
        """Add time, spans and samples of the newest step, unless it is the first, to `usage`, and return `usage`.

        `_usage` gets a step only when the next one ends, because ranks report its last spans with the next step.
        """
        start_s, end_s = self.step_ends_s[-2:] if len(self.step_ends_s) > 1 else (0.0, 0.0)
        if end_s > start_s:
            spans = [span for recent in self._recent.values() for span in recent]
            # a lost server has no spans
            usage.add(spans, self._samples, start_s, end_s, pools=self._recent, there=self._there)
        return usage

    def _write_trace(self, until_s: float) -> None:
        """Move the spans that ended by `until_s`, and the samples before it, from memory to timeline.json."""
        ended = [span for recent in self._recent.values() for span in recent if span.end_s <= until_s]
        self._trace.add(ended, [sample for sample in self._samples if sample.time_s < until_s])
        self._recent = {
            pool: [span for span in recent if span.end_s > until_s] for pool, recent in self._recent.items()
        }
        self._samples = [sample for sample in self._samples if sample.time_s >= until_s]
        self._sample_gap_s = 0.0
