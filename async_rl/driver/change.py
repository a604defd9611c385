"""Lets tasks of the driver wait for what others change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from async_rl.config import Limit
from async_rl.errors import WaitTimeoutError


class Change:
    """A condition that tasks of one event loop wait for."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()

    async def wait_until(self, is_met: Callable[[], bool], limit: Limit, what: str) -> None:
        """Wait until `is_met` is true, which is asked after each `notify`; after `limit` for `what`, WaitTimeoutError.
        """
        try:
            async with asyncio.timeout(limit.seconds), self._condition:
                await self._condition.wait_for(is_met)
        except TimeoutError:
            raise WaitTimeoutError(f"the driver waited {limit} for {what}") from None

    async def notify(self) -> None:
        async with self._condition:
            self._condition.notify_all()
