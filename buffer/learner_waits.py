"""Measures how long the learner waits for a batch: for groups at all, or for late ones alone."""

from __future__ import annotations


class LearnerWaits:
    """Adds up the time in which the learner waits for one thing, before each batch.

    All times are by the buffer's clock.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None
        """The time since when the learner waits; None: it does not."""
        self._waited_s = 0.0
        """The sum of its earlier waits since the last batch."""
        self._handed_out = (-1, 0.0)

    def begin(self, now_s: float) -> None:
        """Note that the learner waits. Does nothing if it does already."""
        if self._since_s is None:
            self._since_s = now_s

    def end(self, now_s: float) -> None:
        """Note that the learner was answered. Without a batch it may do something else before it asks again."""
        if self._since_s is not None:
            self._waited_s += now_s - self._since_s
            self._since_s = None

    def hand_out(self, version: int, now_s: float) -> float:
        """Return the seconds of waits before batch `version`; the same for a batch that is asked for again."""
        self.end(now_s)
        if version != self._handed_out[0]:
            self._handed_out = (version, self._waited_s)
            self._waited_s = 0.0
        return self._handed_out[1]
