"""Writes weights as the safetensors files that transformers, SGLang and the hf engine load from a model folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


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
