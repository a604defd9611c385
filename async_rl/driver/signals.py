"""Ctrl-C and SIGTERM: once is a wish, twice is an order."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any


class StopSignals:
    """While it is open, both signals raise KeyboardInterrupt in the main thread, as Ctrl-C does without it.

    Within `deferred` the first one only sets `requested`. From the second on, `at_once` is set; the third and later
    ones change nothing, so that the end the second one asked for is not cut short.
    """

    def __init__(self) -> None:
        self.requested = False
        self._count = 0
        self._is_deferred = False

    @property
    def at_once(self) -> bool:
        return self._count > 1

    def __enter__(self) -> StopSignals:
        self._before = self.install()
        return self

    def install(self) -> dict[signal.Signals, Any]:
        """Again after what puts in handlers of its own, as ray.init does. Returns the handlers there were."""
        before: dict[signal.Signals, Any] = {}
        with contextlib.suppress(ValueError):  # not in the main thread: the caller has the signals
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, self._handle)
        return before

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False

    def _handle(self, number: int, frame: Any) -> None:
        self._count += 1
        self.requested = True
        if self._count == 2 or (self._count == 1 and not self._is_deferred):
            raise KeyboardInterrupt
