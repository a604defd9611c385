"""The transport through files on a disk that learner and servers share. It works where no other transport does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.weights.checkpoint_names import write_weights
from async_rl.base.weights.servers import Members
from async_rl.base.weights.transport import Transport


class DiskTransport(Transport):
    """Writes a model folder, and makes every server load it.

    It alternates between two folders, because a slow server may still read the last one.
    """

    def __init__(self, config: Config, members: Members, rank: int, device: torch.device) -> None:
        super().__init__(config, members, rank, device)
        self.model_path = Path(config.model.path)
        self.folder = (config.run_dir / "weights").resolve()

    def connect(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def stage(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> tuple[Path, int]:
        """Write all weights into the folder that the last push did not use. Returns (the folder, the number of bytes).
        """
        target = self.folder / str(version % 2)
        shutil.rmtree(target, ignore_errors=True)  # there may be more shards of an older version than of this one
        target.mkdir(exist_ok=True)  # a network disk may keep a folder that a server still reads
        for source in self.model_path.glob("*.json"):
            if not source.name.endswith(".index.json"):
                shutil.copy(source, target)
        return target, write_weights(named_tensors, target, self.dtype, self.bucket_bytes)

    def send(self, staged: tuple[Path, int], version: int) -> int:
        """Make every server load the folder."""
        target, num_bytes = staged
        self.members.call(lambda admin: admin.load_folder(target, version), f"push of version {version}")
        return num_bytes

    def close(self) -> None:
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
