"""Defines StopSignals, which handles Ctrl-C and SIGTERM, and RunControl, with which a program ends or saves a run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

STOPPING = b"interrupted: ending as soon as this stage is done. Again to end at once\n"
StepListener = Callable[[int, dict[str, float]], None]
"""A function that the driver calls with the version and metrics of each logged step. It must return quickly."""


class StopSignals:
    """Within this context Ctrl-C and SIGTERM raise KeyboardInterrupt in the main thread.

    Within `deferred` the first signal only sets `requested`, because Python loses an exception that a signal raises in
    a destructor, a callback or an import lock. The second signal always raises, and sets `at_once`. Later signals are
    ignored, so that the clean-up can finish.
    """

    def __init__(self) -> None:
        self.requested = False
        self.is_heeded = False
        """Whether training has ended. From then on `check` raises nothing."""
        self._count = 0
        self._on_request: Callable[[], object] | None = None

    @property
    def at_once(self) -> bool:
        return self._count > 1

    def __enter__(self) -> StopSignals:
        self._before = self.install()
        return self

    def install(self) -> dict[signal.Signals, Any]:
        """Install the handlers, and return the earlier handlers by signal. Call it again after ray.init, which replaces
        the handlers. Outside the main thread it does nothing.
        """
        before: dict[signal.Signals, Any] = {}
        with contextlib.suppress(ValueError):  # outside the main thread only the caller can set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, self._handle)
        return before

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self, on_request: Callable[[], object] = lambda: os.write(2, STOPPING)) -> Iterator[None]:
        """Within this context the first signal raises nothing, and calls `on_request` (default: print STOPPING).
        """
        before, self._on_request = self._on_request, on_request
        try:
            yield
        finally:
            self._on_request = before

    def check(self) -> None:
        """Raise KeyboardInterrupt if an end is requested and training has not ended. Call between stages of the start.
        """
        if self.requested and not self.is_heeded:
            raise KeyboardInterrupt

    def request(self) -> None:
        """Request the end of the run as a first signal does, but raise nothing. Thread-safe.

        The request does not count as a signal: a first signal after it still does not end the run immediately.
        """
        if not self.requested:
            self.requested = True
            if self._on_request:
                self._on_request()

    def _handle(self, number: int, frame: Any) -> None:
        was_requested, self.requested = self.requested, True
        self._count += 1
        if self._count == 1 and self._on_request:
            if was_requested:
                os.write(2, STOPPING)  # the end is on its way; this says that the next signal does not wait for it
            else:
                self._on_request()
        elif self._count <= 2:
            raise KeyboardInterrupt


class RunControl:
    """Sends the requests of a program to the learner: to end the run, or to save a checkpoint. Thread-safe.

    A request before the learner's start waits for it. A request after the end of the run has no effect. After a
    rollback, a new learner gets an earlier request to end.

    Args:
        on_step: called for each logged step. The metrics include the evaluations that ended since the previous step.
    """

    def __init__(self, on_step: StepListener = lambda version, metrics: None) -> None:
        self.on_step = on_step
        self.run_dir: Path | None = None
        """The run directory; None before it is made."""
        self.servers: dict[str, str] = {}
        """The servers that the run is to have, as in ServerPool: a rollback keeps them."""
        self._lock = threading.Lock()
        self._learner: Any = None
        self._end_reason = ""
        """Why the program has ended the run; empty if it has not."""
        self._save_waits = False

    def connect(self, learner: Any) -> None:
        """Send earlier and later requests to an actor.

        Args:
            learner: the actor of learner rank 0.
        """
        with self._lock:
            self._learner, reason = learner, self._end_reason
            save_waits, self._save_waits = self._save_waits, False
        if reason:
            learner.end.remote(reason)
        if save_waits:
            learner.save.remote()

    def disconnect(self) -> None:
        """Send no further requests to this learner. Later requests wait for the next `connect`."""
        with self._lock:
            self._learner = None

    def end(self, reason: str) -> None:
        """Have the run end after the current step, as if run.steps were reached.

        Args:
            reason: why the run ends, for the log and the summary. The reason of the first call is kept.
        """
        with self._lock:
            self._end_reason, learner = self._end_reason or reason, self._learner
        if learner is not None:
            learner.end.remote(reason)

    def save(self) -> None:
        """Have a checkpoint written after the current step."""
        with self._lock:
            learner, self._save_waits = self._learner, self._learner is None
        if learner is not None:
            learner.save.remote()
