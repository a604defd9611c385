"""Ends the driver's work with a process that counts as dead because it hangs, although no call to it has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from async_rl.errors import AsyncRLError


class ServerLostError(Exception):
    """A rollout server is lost and may be restarted; `args[0]` is the AsyncRLError that says why."""


class LostProcesses:
    """Ends the driver's work with a process as soon as another task declares that process lost."""

    def __init__(self) -> None:
        self._reasons: dict[str, asyncio.Future[AsyncRLError]] = {}

    async def until_lost(self, name: str, life: Coroutine[Any, Any, None]) -> None:
        """Await `life`, the driver's work with process `name`, but cancel it if the process is declared lost.

        Raises:
            ServerLostError: `name` is a rollout server that was declared lost.
            AsyncRLError: the reason for which another process was declared lost.
            Exception: whatever `life` raises.
        """
        reason = self._reasons[name] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(life)
        try:
            await asyncio.wait([task, reason], return_when=asyncio.FIRST_COMPLETED)
            if not reason.done():
                await task
                return
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        raise ServerLostError(reason.result()) if name.startswith("rollout") else reason.result()

    def declare(self, name: str, error: AsyncRLError) -> None:
        """Make the running `until_lost` of process `name` raise `error`. A second call has no effect."""
        if not self._reasons[name].done():
            self._reasons[name].set_result(error)
