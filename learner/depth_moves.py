"""Keeps the number of slots that the driver wants until the learner tells the buffer of the next served version."""

from __future__ import annotations

import threading
from typing import NamedTuple


class DepthMove(NamedTuple):
    """A number of slots, and why the buffer should have it."""

    slots: int
    reason: str


class DepthMoves:
    """Hands a move from the driver's thread to the learner's. A newer one replaces one that was not taken yet."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._move: DepthMove | None = None

    def put(self, slots: int, reason: str) -> None:
        with self._lock:
            self._move = DepthMove(slots, reason)

    def take(self) -> DepthMove | None:
        """Return the move that was put last, once; None if there is none."""
        with self._lock:
            move, self._move = self._move, None
        return move
