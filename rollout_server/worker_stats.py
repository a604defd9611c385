"""What a rollout pool is doing, as gapless spans and as a status; and what its rollout groups saw of each other."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from async_rl.telemetry.metrics import Metric
from async_rl.telemetry.status import Status
from async_rl.telemetry.timeline import Span, State, Timeline


@dataclass(frozen=True, slots=True)
class _Wait:
    doing: str
    waits_on: str
    began_s: float
    """By the monotonic clock."""
    limit_s: float


class WorkerStats:
    """`busy` while a group is in flight; else `eval` while an evaluation runs; else `wait_weights`: a worker without a
    group waits for admission, which opens with the next served weights.
    """

    def __init__(self, pool: str) -> None:
        self._timeline = Timeline(pool)
        self._since_s = time.time()
        self._changed_s = self._since_s
        """When in_flight last went from none to some, or back."""
        self._waits: dict[int, _Wait] = {}
        """Of the groups, and of the greedy answers and held-out prompts beside them."""
        self._evaluations = 0
        self.in_flight = 0
        """Groups between their grant and the buffer's acknowledgement."""
        self._group_seconds = 0.0
        """Integral of in_flight over time, up to _counted_s."""
        self._counted_s = time.monotonic()
        self._finished: list[tuple[float, float]] = []
        """(seconds in flight, mean number of groups in flight meanwhile) of each group since the last drain."""

    def enter(self) -> tuple[float, float]:
        """A group starts; the result belongs to its `leave`."""
        if self.in_flight == 0:
            self._cut()
            self._changed_s = self._since_s
        self._count(+1)
        return self._counted_s, self._group_seconds

    def leave(self, entered: tuple[float, float]) -> None:
        if self.in_flight == 1:
            self._cut()
            self._changed_s = self._since_s
        self._count(-1)
        start_s, start_group_seconds = entered
        seconds = max(self._counted_s - start_s, 1e-9)
        self._finished.append((seconds, (self._group_seconds - start_group_seconds) / seconds))

    @contextlib.contextmanager
    def waiting(self, doing: str, waits_on: str, limit_s: float) -> Iterator[None]:
        """Around what a request waits for: at most `limit_s`, which whoever waits keeps by itself."""
        wait = _Wait(doing, waits_on, time.monotonic(), limit_s)
        self._waits[id(wait)] = wait
        try:
            yield
        finally:
            del self._waits[id(wait)]

    def status(self) -> Status:
        """How many requests do what, and of these waits the one that is closest to its limit."""
        now_s = time.time()
        if not self._waits:
            if self.in_flight:
                return Status(doing=f"prepares {self.in_flight} groups", since_s=self._changed_s, told_s=now_s)
            return Status(
                doing="waits for admission", waits_on="buffer (learner)", since_s=self._changed_s, told_s=now_s
            )
        first = min(self._waits.values(), key=lambda wait: wait.began_s + wait.limit_s)
        counts = Counter(wait.doing for wait in self._waits.values())
        doing = ", ".join(f"{doing} {number} requests" for doing, number in sorted(counts.items()))
        # A clock that is set must not make a wait look overdue.
        since_s = now_s - (time.monotonic() - first.began_s)
        return Status(doing=doing, waits_on=first.waits_on, since_s=since_s, told_s=now_s, limit_s=first.limit_s)

    def enter_evaluation(self) -> None:
        self._cut()
        self._evaluations += 1

    def leave_evaluation(self) -> None:
        self._cut()
        self._evaluations -= 1

    def drain(self) -> tuple[Span, ...]:
        """The spans since the last call, up to now."""
        self._cut()
        return self._timeline.drain()

    def drain_groups(self) -> list[Metric]:
        """Of the groups that ended since the last call: seconds in flight, its square, and how many were in flight
        at once. From these a prediction takes how fast the engine is at which load.
        """
        finished, self._finished = self._finished, []
        if not finished:
            return []
        n = len(finished)
        return [
            Metric("rollout/group_s", sum(seconds for seconds, _ in finished) / n, weight=n),
            Metric("rollout/group_s_squared", sum(seconds**2 for seconds, _ in finished) / n, weight=n),
            Metric("rollout/concurrency", sum(beside for _, beside in finished) / n, weight=n),
        ]

    def _count(self, change: int) -> None:
        now_s = time.monotonic()
        self._group_seconds += self.in_flight * (now_s - self._counted_s)
        self._counted_s = now_s
        self.in_flight += change

    def _cut(self) -> None:
        """Records the state that ends or is interrupted now."""
        now_s = time.time()
        idle: State = "eval" if self._evaluations else "wait_weights"
        self._timeline.add("busy" if self.in_flight else idle, self._since_s, now_s)
        self._since_s = now_s
