"""An engine whose event loop runs in a thread, for tests that are plain functions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from async_rl.base.config import Config

Result = TypeVar("Result")


class EngineInThread:
    """An engine with an event loop of its own, for tests that are plain functions."""

    def __init__(self, config: Config, log_dir: Path) -> None:
        from rollout_server.engines.base import open_engine

        self.config = config
        self.engine = open_engine(config, 0, log_dir)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    @property
    def overrides(self) -> list[str]:
        """The overrides of a config that make a run use this server, and no other."""
        return [f"rollout.server_urls=[{self.engine.url}]", f"network.keys={self.config.network.keys}"]

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float = 120.0) -> Result:
        return self.begin(coroutine).result(timeout_s)

    def begin(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        self.run(self.engine.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
