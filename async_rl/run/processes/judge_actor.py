"""The process of a judge server, as a Ray actor. A run without a judge does not load this module."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from async_rl.base.messages.reports import WorkerReport
from async_rl.base.models_and_data.fetching import find_files, located
from async_rl.base.telemetry.status import Status
from async_rl.run.processes.actors import Origin, dump_stacks, enter, pin_cpus
from buffer.keys import drop_client_keys

CHECK_INTERVAL_S = 1.0


class JudgeActor:
    """A judge server. It serves the model judge.path to the workers over HTTP, and gets no weights.

    Args:
        index: the index of the server in `config.judge_names`.
    """

    def __init__(self, origin: Origin, index: int) -> None:
        self._origin, self._name = origin, origin.config.judge_names[index]
        self._log_name = self._name.replace("/", "-")
        self._config = enter(origin, self._name)
        pin_cpus(origin.config, len(origin.config.server_names) + index)
        self._doing, self._since_s = "starts its server", time.monotonic()

    async def find_files(self) -> None:
        """Check that this host has the judge's model. A model on the hub is downloaded.

        Raises:
            ConfigError: the model is not on this host, or the download failed.
        """
        await asyncio.to_thread(find_files, self._config, ["judge.path"])

    async def start(self) -> str:
        """Start the server, wait until it answers, and return the base URL of its endpoint."""
        config = located(self._config, ["judge.path"])
        log_file = config.run_dir / "logs" / f"server-{self._log_name}.log"
        open_chat = config.judge.engine_entry.load_chat()
        self._server = await asyncio.to_thread(open_chat, config, self._name, log_file)
        await self._server.start()
        self._doing, self._since_s = f"judges, as {config.judge.path}", time.monotonic()
        return f"{self._server.url}/v1"

    async def kv_tokens(self) -> int:
        """Return 0, because the size of the KV cache is not known."""
        return 0

    async def run(self) -> AsyncIterator[WorkerReport]:
        """Watch the server, and yield an empty report every CHECK_INTERVAL_S seconds.

        Raises:
            ProcessDiedError: the server has ended.
        """
        while True:
            self._server.check_alive()
            await asyncio.sleep(CHECK_INTERVAL_S)
            yield WorkerReport()

    async def status(self) -> Status:
        return Status(doing=self._doing, since_s=self._since_s)

    async def dump_stacks(self) -> None:
        dump_stacks()

    async def stop(self) -> None:
        if hasattr(self, "_server"):
            await self._server.aclose()
        drop_client_keys(self._config.network.keys, self._origin.client_keys)
