"""An hf engine in a process of its own, which says what bits its weights have, and what pushes have asked of it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_rl.base.config import Config
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

    def calls(self) -> list[str]:
        """What pushes have asked of the engine since the last time."""
        self._pipe.send("which calls?")
        calls: list[str] = self._answer()
        return calls

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which the process stands still, so that any call to it hangs."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_S), "the serving process does not answer"
        return self._pipe.recv()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)


def checksums(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    return {name: checksum(weight.detach().to(dtype).contiguous()) for name, weight in weights.items()}


class NotingEngine(HFEngine):
    """Notes what pushes ask of it."""

    def __init__(self, config: Config) -> None:
        super().__init__(config, 0)
        self.calls: list[str] = []

    async def pause(self, *, keep_kv: bool) -> None:
        self.calls.append("pause")
        await super().pause(keep_kv=keep_kv)

    async def erase_weights(self) -> None:
        self.calls.append("erase_weights")
        await super().erase_weights()

    async def load_weights(self, tensors: dict[str, Tensor], version: int) -> None:
        self.calls.append("load_weights")
        await super().load_weights(tensors, version)

    async def unloaded_weights(self) -> list[str]:
        self.calls.append("unloaded_weights")
        return await super().unloaded_weights()

    async def value_sums(self) -> tuple[float, float]:
        self.calls.append("value_sums")
        return await super().value_sums()

    def resume(self) -> None:
        self.calls.append("resume")
        super().resume()


def run(model: Path, dtype: str, pipe: Connection) -> None:
    """Send the URL, then answer each question: which version and weights are served, or which calls were noted."""

    async def serve() -> None:
        engine = NotingEngine(changed(server_config("hf", model), model={"dtype": dtype}))
        await engine.start()
        pipe.send(engine.url)
        while question := await asyncio.to_thread(pipe.recv):
            if question == "which calls?":
                calls, engine.calls = engine.calls, []
                pipe.send(calls)
            else:
                weights = dict(engine.model.named_parameters())
                pipe.send((engine.version, checksums(weights, getattr(torch, dtype))))

    torch.set_num_threads(1)
    asyncio.run(serve())
