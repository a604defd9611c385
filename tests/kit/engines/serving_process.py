"""An hf engine in a process of its own, which says what bits its weights have.

python -m tests.kit.engines.serving_process MODEL DTYPE prints the URL, then answers each line of its standard input
with the version that it serves and the checksum of each weight, and serves until the input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import torch
from torch import Tensor

from async_rl.weights.parcels import checksum
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import changed, server_config

ANSWER_S = 120.0


class ServingProcess(AbstractContextManager["ServingProcess"]):
    """Starts the process, and waits until it serves at `url`. At the end of the `with` block it is killed."""

    def __init__(self, model: Path, dtype: str) -> None:
        command = [sys.executable, "-m", "tests.kit.engines.serving_process", str(model), dtype]
        self.process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)
        self.url = self._line()

    def served(self) -> tuple[int, dict[str, int]]:
        """(version, checksum of each weight by name)."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        version, sums = json.loads(self._line())
        return version, sums

    def _line(self) -> str:
        assert self.process.stdout is not None
        assert wait([self.process.stdout.fileno()], ANSWER_S), "the serving process does not answer"
        return self.process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=ANSWER_S)


def checksums(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, int]:
    return {name: checksum(weight.detach().to(dtype).contiguous()) for name, weight in weights.items()}


async def main(model: Path, dtype: str) -> None:
    torch.set_num_threads(1)
    engine: Any = HFEngine(changed(server_config("hf", model), model={"dtype": dtype}), 0)
    await engine.start()
    print(engine.url, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        weights = dict(engine.model.named_parameters())
        print(json.dumps([engine.version, checksums(weights, getattr(torch, dtype))]), flush=True)
    await engine.aclose()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
