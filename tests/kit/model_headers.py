"""Model folders whose weight files have headers but no data, and the bytes that a rank needs to load one."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedConfig

from async_rl.base.config import LearnerConfig, ModelConfig
from learner.loop.ranks import Ranks
from learner.memory.passes import LiveBytes
from learner.models import network
from learner.models.policy import open_policy, shard

QWEN2_5: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "vocab_size": 152_064, "tie_word_embeddings": False},
    "72B": {"hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8, "vocab_size": 152_064, "tie_word_embeddings": False},
}  # fmt: skip
"""The shapes of Qwen2.5's models."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The bytes of one rank at a load, counted with meta tensors."""

    whole: int
    """All weights in float32."""
    shards: int
    block: int
    """A transformer block in float32."""
    largest: int
    """The largest tensor in float32."""
    peak: int
    """The most bytes that existed at a time while the weights were read."""


class HeaderOnly:
    """Stands in for an open safetensors file: its tensors are meta tensors with the shapes in its header."""

    def __init__(self, file: Path, framework: str) -> None:
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            self._header = json.loads(opened.read(size))

    def __enter__(self) -> HeaderOnly:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def keys(self) -> list[str]:
        return list(self._header)

    def get_slice(self, name: str) -> MetaSlice:
        return MetaSlice(self._header[name]["shape"])

    def get_tensor(self, name: str) -> Tensor:
        return self.get_slice(name)[:]


@dataclass(frozen=True, slots=True)
class MetaSlice:
    """Stands in for a tensor of a safetensors file of which nothing is read yet."""

    shape: list[int]

    def get_shape(self) -> list[int]:
        return self.shape

    def __getitem__(self, rows: slice) -> Tensor:
        num_rows = len(range(*rows.indices(self.shape[0])))
        return torch.empty(num_rows, *self.shape[1:], dtype=torch.bfloat16, device="meta")


def save_headers(config: PreTrainedConfig, folder: Path) -> None:
    """Save a bfloat16 model folder whose weight files have headers but no data: they are holes of the right size."""
    config.architectures = [f"{config.model_type.capitalize()}ForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    weight_map = {}
    for number, (name, parameter) in enumerate(lm.named_parameters()):
        num_bytes = 2 * parameter.numel()
        entry = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [0, num_bytes]}
        header = json.dumps({name: entry}).encode()
        file = folder / f"model-{number:05d}.safetensors"
        file.write_bytes(struct.pack("<Q", len(header)) + header)
        os.truncate(file, 8 + len(header) + num_bytes)
        weight_map[name] = file.name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def count(folder: Path, ranks: int) -> Counted:
    """Load the model in `folder` as rank 0 of `ranks` with meta tensors, and count what lives at a time."""
    with fake_ranks(ranks):
        policy = open_policy(ModelConfig(path=str(folder)), torch.bfloat16)
        stored = policy.lm.stored_weights
        del policy.lm.stored_weights
        whole = {name: 4 * parameter.numel() for name, parameter in policy.lm.named_parameters()}
        shard(policy, Ranks(init_device_mesh("cpu", (ranks,))), LearnerConfig())
        policy.lm.stored_weights = stored
        counter = LiveBytes()
        with mock.patch.object(network, "safe_open", HeaderOnly), mock.patch.object(network, "check_finite"), counter:
            network.read_weights(policy, policy.lm, "meta")
    shards = [4 * parameter.to_local().numel() for parameter in policy.lm.parameters()]
    block = sum(num_bytes for name, num_bytes in whole.items() if ".layers.0." in name)
    return Counted(sum(whole.values()), sum(shards), block, max(whole.values()), counter.peak)


@contextmanager
def fake_ranks(ranks: int, rank: int = 0) -> Iterator[None]:
    """Be one of `ranks` ranks, of which no other exists, within the block."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds this rank's meshes
