"""Follows processes with asyncio tasks: `Lives` ends a task when its process is declared lost, `Change` wakes tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from async_rl.base.config import Limit
from async_rl.base.errors import AsyncRLError, WaitTimeoutError


class LostError(Exception):
    """A process is lost. `error` says why."""

    def __init__(self, error: AsyncRLError) -> None:
        super().__init__(str(error))
        self.error = error


class Lives:
    """The tasks that follow processes. A task ends when its process ends, or when the process is declared lost."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reasons: dict[str, AsyncRLError] = {}
        """Why a process was declared lost, until `follow` raises it."""

    async def follow(self, name: str, life: Coroutine[Any, Any, None]) -> None:
        """Wait until `life` ends, or until `declare_lost` cancels it.

        Args:
            life: follows process `name`, for example reads its reports.

        Raises:
            LostError: the process was declared lost.
        """
        task = self._tasks[name] = asyncio.create_task(life)
        try:
            await task
        except asyncio.CancelledError:
            reason, follower = self._reasons.pop(name, None), asyncio.current_task()
            if reason is None or (follower and follower.cancelling()):
                task.cancel()
                raise
            raise LostError(reason) from None

    def declare_lost(self, name: str, error: AsyncRLError) -> None:
        """Treat a process as dead, even if no call to it failed. Its `follow` then raises `error`."""
        if name in self._tasks and self._tasks[name].cancel():
            self._reasons.setdefault(name, error)


class Change:
    """A condition variable for the driver's asyncio tasks."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()

    async def wait_until(self, is_met: Callable[[], bool], limit: Limit | None, what: str) -> None:
        """Wait until `is_met()` returns True. It is called again after each `notify`.

        Args:
            limit: the time limit; None: the tasks that are waited for have limits of their own.
            what: what the driver waits for, for the error.

        Raises:
            WaitTimeoutError: `is_met` was not true within `limit`.
        """
        try:
            async with asyncio.timeout(limit.seconds if limit else None), self._condition:
                await self._condition.wait_for(is_met)
        except TimeoutError:
            raise WaitTimeoutError(f"the driver waited {limit} for {what}") from None

    async def notify(self) -> None:
        async with self._condition:
            self._condition.notify_all()
