"""What a rollout pool is doing, as gapless spans."""

from __future__ import annotations

import time

from async_rl.timeline import Span, Timeline


class Activity:
    """`busy` while a group is in flight, else `wait_weights`: a worker without a group waits for admission,
    which opens with the next served weights. `eval` lies over both while an evaluation runs.
    """

    def __init__(self, pool: str) -> None:
        self._timeline = Timeline(pool)
        self._since_s = time.time()
        self._evaluations = 0
        self.in_flight = 0
        """Groups between their grant and the buffer's acknowledgement."""

    def enter(self) -> None:
        if self.in_flight == 0:
            self._cut()
        self.in_flight += 1

    def leave(self) -> None:
        if self.in_flight == 1:
            self._cut()
        self.in_flight -= 1

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

    def _cut(self) -> None:
        """Records the state that ends or is interrupted now."""
        now_s = time.time()
        if self._evaluations:
            self._timeline.add("eval", self._since_s, now_s)
        self._timeline.add("busy" if self.in_flight else "wait_weights", self._since_s, now_s)
        self._since_s = now_s
