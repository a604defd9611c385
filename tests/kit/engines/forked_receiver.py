"""A receiver of weight pushes that starts at once, as its process is forked from one with its imports."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from async_rl.base.config import Config, NetworkConfig, TimeoutsConfig
from benchmarks.weight_receiver import START_S, ReceiverProcess, TensorEngine, tensor_names
from rollout_server.engines.hf.engine import WeightEndpoints
from rollout_server.engines.http_admin import HttpAdmin
from tests.kit.forked import forked

NUM_ELEMENTS = 512 * 512


class ForkedReceiver(ReceiverProcess):
    """A server of `num_tensors` tensors of 1 MB at `url`, with the folder model.path; `port` 0: any that is free."""

    def __init__(self, num_tensors: int, config: Config, port: int = 0) -> None:
        self.names = tensor_names(num_tensors)
        context = forked()
        self._pipe, theirs = context.Pipe()
        arguments = num_tensors, config.timeouts.push_s, port, theirs, Path(config.model.path)
        self.forked = context.Process(target=run, args=arguments, daemon=True)
        self.forked.start()
        assert self._pipe.poll(START_S), "the receiver does not start"
        self.url: str = self._pipe.recv()
        self._admin = HttpAdmin(config, self.url)

    def kill(self) -> None:
        self.forked.kill()
        self.forked.join()

    close = kill


def run(num_tensors: int, timeout_s: float, port: int, pipe: Connection, model: Path) -> None:
    """Serve the weight endpoints, send their URL, and end with the parent process."""

    async def serve() -> None:
        engine: Any = TensorEngine(num_tensors, NUM_ELEMENTS)
        network = NetworkConfig(ports=f"{port}-{port}") if port else NetworkConfig()
        endpoints = WeightEndpoints(engine, TimeoutsConfig(push_s=timeout_s), network, model)
        pipe.send(await endpoints.start())
        with suppress(EOFError):
            await asyncio.to_thread(pipe.recv)
        await endpoints.aclose()

    torch.set_num_threads(1)
    asyncio.run(serve())
