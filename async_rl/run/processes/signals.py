"""Ends a run early, or has it save: Ctrl-C and SIGTERM (StopSignals), and the program that started it (RunControl)."""

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
"""Called with the version and the metrics of each step that is logged, in the driver: it must return at once."""


class StopSignals:
    """A context where Ctrl-C and SIGTERM raise KeyboardInterrupt in the main thread.

    Within `deferred` the first signal only sets `requested`, because Python loses an exception that a signal raises in
    a destructor, a callback or an import lock. The second one raises and sets `at_once`; later signals are ignored, so
    that they do not cut the clean-up short.
    """

    def __init__(self) -> None:
        self.requested = False
        self.is_heeded = False
        """Whether training has ended for the request, or without one: `check` does not raise any more."""
        self._count = 0
        self._on_request: Callable[[], object] | None = None

    @property
    def at_once(self) -> bool:
        return self._count > 1

    def __enter__(self) -> StopSignals:
        self._before = self.install()
        return self

    def install(self) -> dict[signal.Signals, Any]:
        """Install the handlers, again after ray.init has replaced them; return {signal: the handler before}."""
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
        """In the `with` block the first signal calls `on_request`, by default printing STOPPING; nothing is raised."""
        before, self._on_request = self._on_request, on_request
        try:
            yield
        finally:
            self._on_request = before

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come before training ended; called between stages of start-up."""
        if self.requested and not self.is_heeded:
            raise KeyboardInterrupt

    def request(self) -> None:
        """Ask for the end of the run as a first signal does, from any thread; nothing is raised here.

        Only signals count: the run still ends with its step after one of them, before or after the request.
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
        """Send all requests, earlier and later ones, to this actor, the learner's rank 0."""
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
