"""Statistics of one rollout worker: its timeline, its status, and how long its groups take at which load."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from async_rl.messages.reports import GroupRecord
from async_rl.telemetry.metrics import Metric
from async_rl.telemetry.status import Status
from async_rl.telemetry.timeline import Span, State, Timeline
from async_rl.types import Group


@dataclass(frozen=True, slots=True)
class _Wait:
    doing: str
    waits_on: str
    began_s: float
    """Time of the monotonic clock."""
    limit_s: float
    noun: str


@dataclass(slots=True)
class _GroupClock:
    start_s: float
    group_seconds: float
    """The integral of groups in flight over time when the group began."""
    sampling_s: float = 0.0
    """The time that the engine took for its longest request, or for all of its longest episode."""
    steps: int = 0
    """The tokens of its longest episode; 0 until the group has reached the buffer."""
    is_aborted: bool = False


class WorkerStats:
    """Counts the groups, evaluations and waits of one worker, for its timeline, its status and its metrics.

    The timeline is `busy` while a group is in flight; else `eval` while an evaluation runs; else `wait_weights`,
    because a worker without a group waits for admission, which opens with the next served weights. That of an
    evaluation server is `busy` while an evaluation runs, which is all that it is for.
    """

    def __init__(self, pool: str) -> None:
        self._timeline = Timeline(pool)
        is_for_evaluations = pool.startswith("eval")
        self._evaluating: State = "busy" if is_for_evaluations else "eval"
        self._idle = ("a version to evaluate", "learner/0") if is_for_evaluations else ("admission", "buffer (learner)")
        """The reason for which an idle worker waits, and the process that ends it."""
        self._span_start_s = time.monotonic()
        self._changed_s = self._span_start_s
        """The time at which in_flight last rose from 0 or fell to 0."""
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
        self._groups: dict[int, _GroupClock] = {}
        self._records: list[GroupRecord] = []
        """The groups that have reached the buffer, or were aborted, since the last drain."""

    def begin_group(self, group_id: int) -> None:
        self._change_in_flight(+1)
        self._groups[group_id] = _GroupClock(self._counted_s, self._group_seconds)

    def sampled(self, group_id: int, seconds: float) -> None:
        """Note how long the engine took for a request of a group; of one that is not in flight, nothing."""
        if clock := self._groups.get(group_id):
            clock.sampling_s = max(clock.sampling_s, seconds)

    def arrived(self, group: Group) -> None:
        """Note that the buffer has got a group, whose end is near, and how many tokens its longest episode has."""
        clock, rows = self._groups[group.group_id], iter(group.rows)
        clock.steps = max(
            sum(int(row.mask.sum()) for row in itertools.islice(rows, number)) for number in group.episode_rows
        )
        if group.episodes:
            clock.sampling_s = max(group.episodes, key=lambda episode: episode.duration_s).generate_s

    def aborted(self, group_id: int) -> None:
        """Note that a group is cancelled because the buffer has dropped it as late."""
        self._groups[group_id].is_aborted = True

    def end_group(self, group_id: int) -> None:
        clock = self._groups.pop(group_id)
        self._change_in_flight(-1)
        seconds = max(self._counted_s - clock.start_s, 1e-9)
        together = (self._group_seconds - clock.group_seconds) / seconds
        self._finished.append((seconds, together))
        if clock.steps or clock.is_aborted:
            sampling_s = min(clock.sampling_s, seconds)
            record = GroupRecord(sampling_s, seconds - sampling_s, clock.steps, together, clock.is_aborted)
            self._records.append(record)

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

    def drain_records(self) -> tuple[GroupRecord, ...]:
        """Return the groups that have reached the buffer, or were aborted, since the last call."""
        records, self._records = tuple(self._records), []
        return records

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
