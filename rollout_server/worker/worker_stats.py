"""Statistics of one rollout worker: its timeline, its status, and how long its groups take by load."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from async_rl.base.telemetry.metrics import Metric
from async_rl.base.telemetry.status import Status
from async_rl.base.telemetry.timeline import Span, State, Timeline


@dataclass(frozen=True, slots=True)
class _Wait:
    doing: str
    waits_on: str
    began_s: float
    """Time of the monotonic clock."""
    limit_s: float
    noun: str


class WorkerStats:
    """Counts the groups, evaluations and waits of one worker, for its timeline, its status and its metrics.

    The timeline is `busy` while a group is in flight; else `eval` while an evaluation runs; else `wait_weights`,
    because a worker without a group waits for admission, which opens with the next served weights. An
    evaluation server is `busy` while an evaluation runs, its only work.
    """

    def __init__(self, pool: str) -> None:
        self._timeline = Timeline(pool)
        is_for_evaluations = pool.startswith("eval")
        self._evaluating: State = "busy" if is_for_evaluations else "eval"
        self._idle = ("a version to evaluate", "learner/0") if is_for_evaluations else ("admission", "buffer (learner)")
        """The reason for which an idle worker waits, and the process that ends it."""
        self._span_start_s = time.monotonic()
        self._changed_s = self._span_start_s
        """The time of the last rise of in_flight from 0 or fall to 0."""
        self._waits: dict[int, _Wait] = {}
        """The waits that have begun and not ended: of groups, of their greedy answers, and of held-out prompts."""
        self._num_evaluations = 0
        self.about = ""
        """The words that `status` adds on the worker."""
        self.in_flight = 0
        """The number of groups that were granted and that the buffer has not yet acknowledged."""
        self._group_seconds = 0.0
        """The integral of in_flight over time until _counted_s."""
        self._counted_s = time.monotonic()
        self._finished: list[tuple[float, float]] = []
        """(seconds in flight, mean number of groups in flight meanwhile) of each group since the last drain."""
        self._began: dict[int, tuple[float, float]] = {}
        """[group id] the time when a group in flight began, and _group_seconds then."""

    def begin_group(self, group_id: int) -> None:
        self._change_in_flight(+1)
        self._began[group_id] = self._counted_s, self._group_seconds

    def end_group(self, group_id: int) -> None:
        start_s, group_seconds = self._began.pop(group_id)
        self._change_in_flight(-1)
        seconds = max(self._counted_s - start_s, 1e-9)
        self._finished.append((seconds, (self._group_seconds - group_seconds) / seconds))

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count an evaluation as running while the `with` block runs."""
        self._close_span()
        self._num_evaluations += 1
        try:
            yield
        finally:
            self._close_span()
            self._num_evaluations -= 1

    @contextlib.contextmanager
    def waiting(self, doing: str, waits_on: str, limit_s: float, noun: str = "requests") -> Iterator[None]:
        """Let `status` show a request as waiting while the `with` block runs.

        Args:
            limit_s: is shown to the watchdog, which takes a process for dead that waits much longer; not enforced here.
            noun: the plural of what waits, if it is no request.
        """
        wait = _Wait(doing, waits_on, time.monotonic(), limit_s, noun)
        self._waits[id(wait)] = wait
        try:
            yield
        finally:
            del self._waits[id(wait)]

    def status(self) -> Status:
        """Return for the watchdog how many requests are doing what, and the wait that is closest to its limit."""
        now_s = time.monotonic()
        if not self._waits:
            doing, waits_on = f"waits for {self._idle[0]}", self._idle[1]
            if self.in_flight:
                doing, waits_on = f"prepares {self.in_flight} groups", ""
            return Status(doing=doing, waits_on=waits_on, since_s=self._changed_s, told_s=now_s, about=self.about)
        first = min(self._waits.values(), key=lambda wait: wait.began_s + wait.limit_s)
        counts = Counter((wait.doing, wait.noun) for wait in self._waits.values())
        doing = ", ".join(f"{doing} {number} {noun}" for (doing, noun), number in sorted(counts.items()))
        return Status(
            doing=doing, waits_on=first.waits_on, since_s=first.began_s, told_s=now_s, limit_s=first.limit_s,
            about=self.about,
        )  # fmt: skip

    def drain_spans(self) -> tuple[Span, ...]:
        self._close_span()
        return self._timeline.drain()

    def drain_groups(self) -> list[Metric]:
        """Return metrics of the groups that have ended since the last call, or [] if none has.

        They are the means of the duration in seconds, of its square and of the groups in flight meanwhile, from which
        the simulator predicts utilisation.
        """
        finished, self._finished = self._finished, []
        if not finished:
            return []
        n = len(finished)
        return [
            Metric("rollout/group_s", sum(seconds for seconds, _ in finished) / n, weight=n),
            Metric("rollout/group_s_squared", sum(seconds**2 for seconds, _ in finished) / n, weight=n),
            Metric("rollout/concurrency", sum(concurrency for _, concurrency in finished) / n, weight=n),
        ]

    def _change_in_flight(self, change: int) -> None:
        if 0 in (self.in_flight, self.in_flight + change):
            self._close_span()
            self._changed_s = self._span_start_s
        now_s = time.monotonic()
        self._group_seconds += self.in_flight * (now_s - self._counted_s)
        self._counted_s = now_s
        self.in_flight += change

    def _close_span(self) -> None:
        """Add the time since the last call to the timeline, as busy, eval or wait_weights."""
        now_s = time.monotonic()
        idle: State = self._evaluating if self._num_evaluations else "wait_weights"
        self._timeline.add("busy" if self.in_flight else idle, self._span_start_s, now_s)
        self._span_start_s = now_s
