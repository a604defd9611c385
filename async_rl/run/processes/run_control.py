"""The requests of a program to its run while it goes on: to end early or to save; and the steps it is told of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

StepListener = Callable[[int, dict[str, float]], None]
"""Called with the version and the metrics of each step that is logged, in the driver: it must return at once."""


class RunControl:
    """Passes the requests of a program to the learner, from any thread. Those before its start wait for it; those after
    the end of the run do nothing. If the run goes on with another learner, after a rollback, an end holds there too.

    Args:
        on_step: told of each step when it is logged, together with the evaluations that ended since the one before.
    """

    def __init__(self, on_step: StepListener = lambda version, metrics: None) -> None:
        self.on_step = on_step
        self.run_dir: Path | None = None
        """The directory of the run, once it has one."""
        self._lock = threading.Lock()
        self._learner: Any = None
        self._end_reason = ""
        """The reason for which the program has ended the run; empty if it has not."""
        self._save_waits = False

    def connect(self, learner: Any) -> None:
        """Pass what was asked for so far, and all that follows, to this actor, the learner's rank 0."""
        with self._lock:
            self._learner, reason = learner, self._end_reason
            save_waits, self._save_waits = self._save_waits, False
        if reason:
            learner.end.remote(reason)
        if save_waits:
            learner.save.remote()

    def disconnect(self) -> None:
        """Ask this learner for nothing more. If the run goes on with another one, what is asked for until then waits.
        """
        with self._lock:
            self._learner = None

    def end(self, reason: str) -> None:
        """Have the run end after its step as if run.steps were reached; `reason` stands in the log and the summary."""
        with self._lock:
            self._end_reason, learner = self._end_reason or reason, self._learner
        if learner is not None:
            learner.end.remote(reason)

    def save(self) -> None:
        """Have a checkpoint written after the step."""
        with self._lock:
            learner, self._save_waits = self._learner, self._learner is None
        if learner is not None:
            learner.save.remote()
