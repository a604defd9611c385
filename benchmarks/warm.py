"""The SGLang server that cells of a sweep share if their configs would start the same server."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.errors import AsyncRLError, WaitTimeoutError

MARGIN_S = 60.0
"""The time limit for ending the server, and for its start in addition to timeouts.server_start_s."""


class WarmServer:
    """Keeps the SGLang server of the last cell running for the next one, if that would start it with the same flags.

    A cell that takes the server over resets it (rollout_server/engines/sglang/engine.py). After a failure a new
    server is started. With GPUs no server is shared, because Ray says which GPU a server has.

    Args:
        configs: the configs of all cells. The server gets room for the cell that needs most.
    """

    def __init__(self, configs: Iterable[Config], log_dir: Path) -> None:
        self._log_dir = log_dir
        self._largest: dict[Any, Config] = {}
        for config in configs:
            key = _key(config)
            if key not in self._largest or self._largest[key].max_slots < config.max_slots:
                self._largest[key] = config
        self._key: Any = None
        self._engine: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def url_for(self, config: Config) -> str:
        """Start a server for the cell, or keep the last; return its URL, or "" if the cell should start its own.

        Raises:
            AsyncRLError: the server did not start.
        """
        if config.rollout.engine != "sglang" or config.placement.rollout.servers > 1 or config.rollout.server_url:
            return ""
        if _has_gpu():
            return ""
        if self._key != _key(config) or not self._answers():
            self.close()
            self._start(self._largest[_key(config)])
            self._key = _key(config)
        return str(self._engine.url)

    def close(self) -> None:
        """End the server, if there is one. Raises nothing: a server that does not end is killed with this process."""
        if self._loop is None:
            return
        if self._engine is not None:
            with suppress(Exception):
                self._run(self._engine.aclose(), MARGIN_S, "end")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(MARGIN_S)
        self._engine = self._loop = self._key = None

    def _answers(self) -> bool:
        """Return whether the server is running and answers a request for its load within MARGIN_S."""
        if self._engine is None:
            return False
        try:
            return self._run(self._engine.load(), MARGIN_S, "say its load") is not None
        except Exception:  # another process may listen on the server's port and answer anything
            return False

    def _start(self, config: Config) -> None:
        """Start the server from a new thread and wait for it. The server ends with that thread and has its cores."""
        from async_rl.driver.actors import share_of_cores

        cores = share_of_cores(config, 0, sorted(os.sched_getaffinity(0))) if config.placement.pin_cpus else []
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), daemon=True)
        self._thread.start()
        try:
            self._run(self._bring_up(config, cores), config.timeouts.server_start_s + MARGIN_S, "start")
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and not isinstance(error, AsyncRLError):
                raise AsyncRLError(f"the sweep's SGLang server did not start: {error!r}") from error
            raise

    async def _bring_up(self, config: Config, cores: list[int]) -> None:
        from rollout_server.engines.base import open_engine

        if cores:
            os.sched_setaffinity(0, cores)  # for this thread and the processes it starts
        self._engine = open_engine(config, 0, self._log_dir)
        await self._engine.start()

    def _run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float, purpose: str) -> Any:
        """Run a coroutine in the server's thread, wait for it, and return its result.

        Raises:
            WaitTimeoutError: the coroutine took longer than `timeout_s` and was cancelled.
        """
        assert self._loop is not None
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            if future.done():
                raise
            raise WaitTimeoutError(f"the sweep waited {timeout_s:.0f} s for its SGLang server to {purpose}") from None
        finally:
            future.cancel()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _key(config: Config) -> Any:
    """Return the settings that a server's flags depend on, as text.

    The number of slots is left out, because the shared server has the largest number, and so is the seed, because
    SGLang's samples do not depend on it.
    """
    return repr((config.model, config.task.max_prompt_tokens, config.rollout, config.placement, config.eval))


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())
