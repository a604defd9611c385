"""The transport through files that learner and servers can read, which works where no other transport does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from async_rl.base.config import Config
from async_rl.base.weights.members import Members
from async_rl.base.weights.transport import Transport


class DiskTransport(Transport):
    """Writes a model folder, then has every server load it. Two folders take turns, as a slow server may still read."""

    def __init__(self, config: Config, members: Members, rank: int, device: torch.device) -> None:
        super().__init__(config, members, rank, device)
        self.model_path = Path(config.model.path)
        self.folder = (config.run_dir / "weights").resolve()

    def connect(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def stage(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> tuple[Path, int]:
        """Write all weights into the folder that no server has loaded last; return it and the number of bytes."""
        target = self.folder / str(version % 2)
        shutil.rmtree(target, ignore_errors=True)  # there may be more shards of an older version than of this one
        target.mkdir(exist_ok=True)  # a network disk may keep a folder that a server still reads
        for source in self.model_path.glob("*.json"):
            if not source.name.endswith(".index.json"):
                shutil.copy(source, target)
        return target, write_weights(named_tensors, target, self.dtype, self.bucket_bytes)

    def send(self, staged: tuple[Path, int], version: int) -> int:
        """Have every server load the folder."""
        target, num_bytes = staged
        self.members.call(lambda admin: admin.load_folder(target, version), f"push of version {version}")
        return num_bytes

    def close(self) -> None:
        if self.rank == 0:
            shutil.rmtree(self.folder, ignore_errors=True)


def write_weights(
    named_tensors: Iterable[tuple[str, Tensor]], folder: Path, dtype: torch.dtype, shard_bytes: int
) -> int:
    """Write `model.safetensors` or, if that would exceed `shard_bytes`, shards and Hugging Face's index of them.

    A tensor larger than `shard_bytes` has its own shard. Only one shard of gathered tensors is in memory at a time.

    Returns:
        The number of bytes of all tensors in `dtype`.
    """
    files: dict[str, list[str]] = {}
    num_bytes = 0
    for number, shard in enumerate(_shards(named_tensors, dtype, shard_bytes), 1):
        files[f"model-{number:05d}.safetensors"] = list(shard)
        save_file(shard, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
    if len(files) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
    else:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return num_bytes


def _shards(
    named_tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_tensors:
        num_bytes = tensor.numel() * dtype.itemsize
        if shard and size + num_bytes > shard_bytes:
            yield shard
            shard.clear()  # the caller has written the shard when it requests the next one
            size = 0
        shard[name] = tensor.detach().to("cpu", dtype).contiguous()
        size += num_bytes
    yield shard
