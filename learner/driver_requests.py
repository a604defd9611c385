"""The requests of the driver to the learner while it trains: to stop, to end early, or to save a checkpoint."""

from __future__ import annotations

import threading

from learner.batch_taking import NoBatch


class DriverRequests:
    """Keeps what the driver asks for from another thread, until rank 0 heeds it when the step under way has ended."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._save = threading.Event()
        self._end_reason = ""

    def stop(self) -> None:
        """Ask for the end of the run with a checkpoint, as after Ctrl-C."""
        self._stop.set()

    def end(self, reason: str) -> None:
        """Ask for the end of the run as if run.steps were reached, for a `reason` that is not empty; the first counts.
        """
        self._end_reason = self._end_reason or reason

    def save(self) -> None:
        """Ask for a checkpoint."""
        self._save.set()

    def saved(self) -> None:
        """Note that the checkpoint is being written."""
        self._save.clear()

    def why_no_batch(self) -> NoBatch | None:
        """Return what the learner has to do instead of a step, the most urgent first; None: nothing was asked for."""
        if self._stop.is_set():
            return NoBatch("stopped")
        if self._end_reason:
            return NoBatch("ended", self._end_reason)
        return NoBatch("checkpoint wanted") if self._save.is_set() else None
