"""Weights through files: the transport of last resort, and the one that needs no process group."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from async_rl.config import Config
from async_rl.weights.base import PushReport, WeightPublisher
from async_rl.weights.safetensors_io import write_weights


class DiskPublisher(WeightPublisher):
    """Writes a model folder that both sides can read, then has every server load it.

    Servers write nothing: the receiving half is SGLang's own `/update_weights_from_disk`, which the hf engine answers
    too. Two folders take turns: a server that is slow to read one does not meet the next push.
    """

    def __init__(self, config: Config, engine_urls: Sequence[str], rank: int, device: torch.device) -> None:
        super().__init__(config, engine_urls, rank, device)
        self.model_path = Path(config.model.path)
        self.folder = (config.run_dir / "weights").resolve()

    def connect(self) -> None:
        if self.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)

    def send(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> PushReport:
        start_s = time.time()
        target = self.folder / str(version % 2)
        shutil.rmtree(target, ignore_errors=True)  # shards that are more than now
        target.mkdir(exist_ok=True)  # a network disk may keep what somebody still reads
        for source in self.model_path.glob("*.json"):
            if not source.name.endswith(".index.json"):
                shutil.copy(source, target)
        num_bytes = write_weights(named_tensors, target, self.dtype, self.bucket_bytes)
        self.open_update()
        body = {"model_path": str(target), "weight_version": str(version), "flush_cache": False}
        self.call_servers("/update_weights_from_disk", body, f"push of version {version}")
        self.close_update()
        return self.report(start_s, num_bytes)

    def close(self) -> None:
        super().close()
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
