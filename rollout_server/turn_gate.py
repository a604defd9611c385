"""Holds back the turns of episodes while a weight push drains (`weight_sync.on_update: drain`).

An episode that waits for a tool has no request at the engine, so a push need not wait for whole groups: it waits until
the replies that are being sampled have ended, and no further one begins before the new weights are served.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from async_rl.errors import WaitTimeoutError


class TurnGate:
    """Lets the replies of one worker's engine begin, or holds them back while a push drains the engine.

    Args:
        worker: the name of the worker, for errors.
        limit_s: how long a reply may be held back: timeouts.generate_s + timeouts.push_s.
    """

    def __init__(self, worker: str, limit_s: float) -> None:
        self._worker = worker
        self._limit_s = limit_s
        self._num_running = 0
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @asynccontextmanager
    async def reply(self) -> AsyncIterator[None]:
        """Wait until the gate is open, and count a reply as being sampled while the `with` block runs.

        Raises:
            WaitTimeoutError: the gate stayed shut for `limit_s`.
        """
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                while not self._is_open.is_set():
                    await self._is_open.wait()
        except TimeoutError:
            if not limit.expired():
                raise
            raise WaitTimeoutError(
                f"{self._worker} waited {self._limit_s:.0f} s (timeouts.generate_s + timeouts.push_s) for the learner "
                "to end a weight push, for which the turns of episodes are held back"
            ) from None
        self._num_running += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._is_idle.set()

    async def shut(self) -> None:
        """Let no further reply begin, and return once none is being sampled; each takes at most timeouts.generate_s."""
        self._is_open.clear()
        await self._is_idle.wait()

    def open(self) -> None:
        """Let replies begin again."""
        self._is_open.set()
