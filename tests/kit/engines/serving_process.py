"""An hf engine in a process of its own, which says what bits its weights have."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_rl.base.weights.parcels import checksum
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import changed, server_config
from tests.kit.forked import forked

ANSWER_S = 120.0


class ServingProcess(AbstractContextManager["ServingProcess"]):
    """Starts the process, and waits until it serves at `url`. At the end of the `with` block it is killed."""

    def __init__(self, model: Path, dtype: str) -> None:
        context = forked()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=run, args=(model, dtype, theirs), daemon=True)
        self.process.start()
        self.url: str = self._answer()

    def served(self) -> tuple[int, dict[str, int]]:
        """(version, checksum of each weight by name)."""
        self._pipe.send("which weights?")
        version, sums = self._answer()
        return version, sums

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "the serving process does not answer"
        return self._pipe.recv()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)


def checksums(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    return {name: checksum(weight.detach().to(dtype).contiguous()) for name, weight in weights.items()}


def run(model: Path, dtype: str, pipe: Connection) -> None:
    """Send the URL, then answer each message with the version that is served and the checksum of each weight."""

    async def serve() -> None:
        engine: Any = HFEngine(changed(server_config("hf", model), model={"dtype": dtype}), 0)
        await engine.start()
        pipe.send(engine.url)
        while await asyncio.to_thread(pipe.recv):
            weights = dict(engine.model.named_parameters())
            pipe.send((engine.version, checksums(weights, getattr(torch, dtype))))

    torch.set_num_threads(1)
    asyncio.run(serve())
