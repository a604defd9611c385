"""A rollout server without a model, in a process of its own, which receives weight pushes and returns the weights' sum.

It has the weight endpoints of the hf engine. In place of logprobs it returns its version and the sum of its weights.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AbstractContextManager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.base.config import Config, NetworkConfig, TimeoutsConfig
from async_rl.base.errors import WaitTimeoutError
from rollout_server.engines.hf.engine import WeightEndpoints, replace_weights
from rollout_server.engines.http_admin import HttpAdmin

START_S = 120.0
END_S = 10.0


class Tensors(nn.Module):
    device = torch.device("cpu")
    _weight_conversions = ()
    """As transformers notes it of a model whose tensors have the names and shapes of its folder."""

    def __init__(self, num_tensors: int, num_elements: int) -> None:
        super().__init__()
        for name in tensor_names(num_tensors):
            self.register_buffer(name, torch.zeros(num_elements // 512, 512))


class TensorEngine:
    """Has the methods of an engine that weight endpoints call. `prompt_logprobs` returns [version, sum of weights]."""

    def __init__(self, num_tensors: int, num_elements: int) -> None:
        self.model = Tensors(num_tensors, num_elements)
        self.version = 0

    async def pause(self, *, keep_kv: bool) -> None:
        pass

    def resume(self, *_: object) -> None:
        pass

    async def load_weights(self, tensors: dict[str, Tensor], version: int) -> None:
        replace_weights(self.model, tensors)
        self.version = version

    async def prompt_logprobs(self, tokens: list[int]) -> list[float]:
        return [float(self.version), sum(t.double().sum().item() for t in self.model.state_dict().values())]


class ReceiverProcess(AbstractContextManager["ReceiverProcess"]):
    """Starts a process that receives weight pushes, and waits until it listens at `url`. `close` ends the process.

    Args:
        port: the port of the process; 0: any that is free.
    """

    def __init__(self, num_tensors: int, config: Config, num_elements: int = 512 * 512, port: int = 0) -> None:
        self.names = tensor_names(num_tensors)
        command = [sys.executable, "-m", "benchmarks.weight_receiver", str(num_tensors), str(num_elements)]
        self.process = subprocess.Popen(
            [*command, str(config.timeouts.push_s), str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        if not wait([self.process.stdout.fileno()], START_S):
            end(self.process)
            raise WaitTimeoutError(f"the benchmark waited {START_S:.0f} s for the weight receiver's address")
        self.url = self.process.stdout.readline().strip()
        self._admin = HttpAdmin(config, self.url)

    def version(self) -> int:
        return int(self._admin.score_tokens([0, 0, 0])[0])

    def checksum(self) -> float:
        return self._admin.score_tokens([0, 0, 0])[1]

    def close(self) -> None:
        end(self.process)

    def __exit__(self, *_: object) -> None:
        self.close()


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and wait for its end. Raises WaitTimeoutError if it does not end within END_S."""
    process.kill()
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        raise WaitTimeoutError(f"waited {END_S:.0f} s for the end of process {process.pid} after SIGKILL") from None


def tensor_names(num_tensors: int) -> list[str]:
    return [f"w{number}" for number in range(num_tensors)]


async def serve(num_tensors: int, num_elements: int, timeout_s: float, port: int) -> None:
    """Serve the weight endpoints and print their URL; return when stdin ends, which it does with the parent process."""
    engine: Any = TensorEngine(num_tensors, num_elements)
    network = NetworkConfig(ports=f"{port}-{port}") if port else NetworkConfig()
    endpoints = WeightEndpoints(engine, TimeoutsConfig(push_s=timeout_s), network, Path())
    print(await endpoints.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await endpoints.aclose()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
