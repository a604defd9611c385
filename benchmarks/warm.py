"""One SGLang server for many cells of a sweep: cells that would start the same server take over the one that runs."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from async_rl.config import Config


class WarmServer:
    """The server of the last cell. A cell takes it over if its server would have the same flags; the cell resets it
    (rollout_server/takeover.py). After a failure a new one is started. Without GPUs only: with them, Ray says which
    GPU a server has.

    Args:
        configs: of all cells, to make room for the one that needs most.
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
        """Of a running server for this cell's rollout.server_url; empty where the cell should start its own.

        Raises:
            AsyncRLError: it did not start.
        """
        if config.rollout.engine != "sglang" or config.placement.rollout.servers > 1 or config.rollout.server_url:
            return ""
        if _has_gpu():
            return ""
        if self._engine is None or self._key != _key(config):
            self.close()
            self._start(self._largest[_key(config)])
            self._key = _key(config)
        return str(self._engine.url)

    def close(self) -> None:
        """End the server, if there is one."""
        if self._loop is None:
            return
        with suppress(TimeoutError):
            self._run(self._engine.aclose(), 60.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._engine = self._loop = None

    def _start(self, config: Config) -> None:
        """In a thread of its own: the server ends with the thread that started it, and has its cores."""
        from rollout_server.engine import open_engine

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(config,), daemon=True)
        self._thread.start()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._engine = open_engine(config, 0, self._log_dir)
        try:
            self._run(self._engine.start(), config.timeouts.server_start_s + 60.0)
        except BaseException:
            self.close()
            raise

    def _serve(self, config: Config) -> None:
        if config.placement.pin_cpus:
            from async_rl.processes import share_of_cores

            os.sched_setaffinity(0, share_of_cores(config, 0, sorted(os.sched_getaffinity(0))))
        assert self._loop is not None
        self._loop.run_forever()

    def _run(self, coroutine: Coroutine[Any, Any, None], timeout_s: float) -> None:
        assert self._loop is not None
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)


def _key(config: Config) -> Any:
    """What a server's flags come from, but for the number of slots, of which the largest counts, and the seed: SGLang's
    samples are not repeated by it.
    """
    return repr((config.model, config.task.max_prompt_tokens, config.rollout, config.placement, config.eval))


def _has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())
