"""Ctrl-C and SIGTERM: the first one ends the run after this step, with a checkpoint, the second one at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any


class StopSignals:
    """While it is open, both signals raise KeyboardInterrupt in the main thread, as Ctrl-C does by itself.

    Within `deferred` the first signal only sets `requested`. The second one raises and sets `at_once`; later ones
    change nothing, so that they do not cut the clean-up short.
    """

    def __init__(self) -> None:
        self.requested = False
        self._count = 0
        self._on_request: Callable[[], object] | None = None

    @property
    def at_once(self) -> bool:
        return self._count > 1

    def __enter__(self) -> StopSignals:
        self._before = self.install()
        return self

    def install(self) -> dict[signal.Signals, Any]:
        """Put the handlers in; again after code that puts in its own, as ray.init does. Returns the former handlers."""
        before: dict[signal.Signals, Any] = {}
        with contextlib.suppress(ValueError):  # not in the main thread: the caller has the signals
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, self._handle)
        return before

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self, on_request: Callable[[], object] = lambda: None) -> Iterator[None]:
        """Within the body the first signal does not raise.

        Args:
            on_request: is called by the first signal, in the main thread.
        """
        self._on_request = on_request
        try:
            yield
        finally:
            self._on_request = None

    def _handle(self, number: int, frame: Any) -> None:
        self._count += 1
        self.requested = True
        if self._count == 1 and self._on_request:
            self._on_request()
        elif self._count <= 2:
            raise KeyboardInterrupt
