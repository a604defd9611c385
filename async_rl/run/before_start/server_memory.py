"""The memory of GPUs that rollout servers share with the learner, when a lost server is started again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from async_rl.base.config import Config, Limit
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.actor_group import ActorGroup

SMALLER = 0.9
"""A server whose KV cache has less than this share of the room that it had at first is told of."""


class ServerMemory:
    """Lets a lost server start when the learner uses only the memory that it keeps, and compares the server's share."""

    def __init__(self, config: Config, processes: ActorGroup, log: RunLog) -> None:
        self._config = config
        self._processes = processes
        self._log = log
        self._first_tokens: dict[str, int] = {}
        """The room in the KV cache of each rollout server at its first start."""

    @asynccontextmanager
    async def turn(self, name: str) -> AsyncIterator[None]:
        """Wait for the end of a step and put off the next one until the block ends, or until the server joins in it, if
        servers and learner take turns in using GPUs; else do nothing. A step makes servers that joined release memory.

        Raises:
            AsyncRLError: the step did not end in time, or learner rank 0 has died.
        """
        if not self._config.shares_gpus:
            yield
            return
        learner: Any = self._processes.actors["learner/0"]
        timeouts = self._config.timeouts
        limit = Limit(timeouts.batch_s + timeouts.silent_s, "timeouts.batch_s + timeouts.silent_s")
        await self._processes.call("learner/0", learner.begin_start.remote(name), limit, f"the turn of {name}")
        try:
            yield
        finally:
            learner.end_start.remote(name)

    async def compare(self, name: str) -> None:
        """Note the room in the KV cache of a server that has started, and tell if it is less than at its first start.

        Raises:
            AsyncRLError: the server did not answer.
        """
        call: Any = self._processes.actors[name].kv_tokens.remote()
        limit = self._config.timeouts.limit("silent_s")
        tokens: int = await self._processes.call(name, call, limit, "the size of its KV cache")
        first = self._first_tokens.setdefault(name, tokens)
        if 0 < tokens < SMALLER * first:
            self._log.logger.note(
                f"{name} came back with room for {tokens} tokens in its KV cache, at first it had {first}: other "
                "processes hold more of its GPU now, so it samples fewer answers at once. A lower "
                "rollout.gpu_memory_utilization leaves them room from the start"
            )
