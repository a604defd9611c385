"""The process of one of the judge's servers, as a Ray actor. A run without a judge does not load this module."""

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
    """A server of the model judge.path. It gets no weights, and the workers talk to it by HTTP.

    Args:
        index: its index in `config.judge_names`.
        port: the port of the server that this one replaces, which the workers know; 0: there was none.
    """

    def __init__(self, origin: Origin, index: int, port: int = 0) -> None:
        self._origin, self._name = origin, origin.config.judge_names[index]
        self._log_name = self._name.replace("/", "-")
        self._config = enter(origin, self._name)
        pin_cpus(origin.config, len(origin.config.server_names) + index)
        self._port = port
        self._doing, self._since_s = "starts its server", time.monotonic()

    async def find_files(self) -> None:
        """Check that this host has the judge's model; download it if it is on the hub."""
        await asyncio.to_thread(find_files, self._config, ["judge.path"])

    async def start(self) -> str:
        """Start the server and wait until it answers; returns the base address of its endpoint."""
        config = located(self._config, ["judge.path"])
        log_file = config.run_dir / "logs" / f"server-{self._log_name}.log"
        open_chat = config.judge.engine_entry.load_chat()
        self._server = await asyncio.to_thread(open_chat, config, self._name, log_file, self._port)
        await self._server.start()
        self._doing, self._since_s = f"judges, as {config.judge.path}", time.monotonic()
        return f"{self._server.url}/v1"

    async def kv_tokens(self) -> int:
        """Return 0: how many tokens its KV cache has room for is not known."""
        return 0

    async def run(self) -> AsyncIterator[WorkerReport]:
        """Watch the server, which reports nothing. ProcessDiedError: it has ended."""
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
