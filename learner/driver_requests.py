"""The requests of the driver to the learner while it trains: to stop, to end early, to save a checkpoint, to pause."""

from __future__ import annotations

import threading

from learner.batch_taking import NoBatch

PAUSE_BEAT_S = 5.0
"""The other ranks wait for rank 0 at most so long at a time, however long a pause lasts."""


class DriverRequests:
    """Keeps what the driver asks for from another thread, until rank 0 heeds it when the step under way has ended."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._save = threading.Event()
        self._end_reason = ""
        self._is_paused = False
        self._changed = threading.Event()
        """Set by each request that ends the wait of a paused learner."""

    def stop(self) -> None:
        """Ask for the end of the run with a checkpoint, as after Ctrl-C."""
        self._stop.set()
        self._changed.set()

    def end(self, reason: str) -> None:
        """Ask for the end of the run as if run.steps were reached, for a `reason` that is not empty; the first counts.
        """
        self._end_reason = self._end_reason or reason

    def save(self) -> None:
        """Ask for a checkpoint."""
        self._save.set()

    def pause(self) -> None:
        """Ask for no further step until `go_on`."""
        self._is_paused = True
        self._changed.clear()

    def go_on(self) -> None:
        """Ask for the end of the pause."""
        self._is_paused = False
        self._changed.set()

    def wait_paused(self) -> None:
        """Wait until something else is asked for, PAUSE_BEAT_S at most: then the other ranks are told again."""
        self._changed.wait(PAUSE_BEAT_S)

    def saved(self) -> None:
        """Note that the checkpoint is being written."""
        self._save.clear()

    def why_no_batch(self) -> NoBatch | None:
        """Return what the learner has to do instead of a step, the most urgent first; None: nothing was asked for."""
        if self._stop.is_set():
            return NoBatch("stopped")
        if self._end_reason:
            return NoBatch("ended", self._end_reason)
        if self._save.is_set():
            return NoBatch("checkpoint wanted")
        return NoBatch("paused") if self._is_paused else None
