"""Measures the memory that a learner rank needs while it loads a model: its shards, and what it reads at a time.

    python -m benchmarks.model_loading --out benchmarks/results/model_loading    # both tables, about five minutes

counted    models of 7B, 32B and 72B parameters at 8 and 64 ranks: the loader runs as rank 0 with meta tensors, whose
           bytes are counted while they live. Nothing is allocated, and the weight files have headers only
measured   a model of 0.5 B parameters (1 GB in bfloat16) at 1, 2 and 4 gloo ranks on this machine: the most memory
           of the process (VmHWM) above what it held before. `whole` loads it as `from_pretrained` does and shards then
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, Qwen2Config

from async_rl.config import LearnerConfig, ModelConfig
from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.tables import write_page
from learner.memory.live_bytes import LiveBytes
from learner.models import loading
from learner.models.policy import Policy, open_policy, shard
from learner.ranks import Ranks

GIB = 2**30
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
        with mock.patch.object(loading, "safe_open", HeaderOnly), mock.patch.object(loading, "check_finite"), counter:
            loading.read_weights(policy, policy.lm, "meta")
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


def counted(sizes: list[str]) -> list[dict[str, Any]]:
    found = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            save_headers(Qwen2Config(**QWEN2_5[size]), Path(folder))
            found += [{"model": size, "ranks": ranks, **asdict(count(Path(folder), ranks))} for ranks in (8, 64)]
    return found


# ------------------------------------------------------------------------------------------ measured on this machine
def load_as_rank(rank: int, ranks: int, store: str, folder: str, way: str) -> None:
    """Write to `store`.<rank> the bytes that a load has added: its peak, and what is left at the end."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    all_ranks = Ranks(init_device_mesh("cpu", (ranks,)))
    AutoConfig.from_pretrained(folder)  # imports what is needed
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status_bytes("VmRSS")
    if way == "whole":
        lm: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        policy = Policy(lm, torch.float32)
    else:
        policy = open_policy(ModelConfig(path=folder), torch.float32)
    shard(policy, all_ranks, LearnerConfig())
    peak, left = status_bytes("VmHWM") - before, status_bytes("VmRSS") - before
    Path(f"{store}.{rank}").write_text(json.dumps([peak, left]))
    dist.barrier()
    dist.destroy_process_group()


def status_bytes(key: str) -> int:
    """Return a size of this process, such as VmRSS, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def measured(size: str, ranks_tried: tuple[int, ...] = (1, 2, 4)) -> dict[str, Any]:
    """Return the bytes of the float32 weights, of the largest tensor, and those that each rank took either way."""
    with tempfile.TemporaryDirectory() as root:
        folder = f"{root}/model"
        lm: nn.Module = AutoModelForCausalLM.from_config(Qwen2Config(**QWEN2_5[size]), dtype=torch.bfloat16)
        counts = [4 * parameter.numel() for parameter in lm.parameters()]
        lm.save_pretrained(folder)  # type: ignore[operator]
        del lm
        found = []
        for ranks in ranks_tried:
            ways: dict[str, Any] = {"ranks": ranks}
            for way in ("whole", "shards"):
                store = f"{root}/{way}-{ranks}"
                mp.start_processes(load_as_rank, (ranks, store, folder, way), nprocs=ranks, start_method="spawn")
                ways[way] = [json.loads(Path(f"{store}.{rank}").read_text()) for rank in range(ranks)]
            found.append(ways)
    return {"model": size, "weights": sum(counts), "largest": max(counts), "loads": found}


def page(of_shapes: list[dict[str, Any]], of_ranks: dict[str, Any], header: str) -> str:
    lines = [
        "# The memory of a load", "", header, "", "All sizes in GiB. Counted with meta tensors, Qwen2.5's shapes, as "
        "rank 0:", "",
        "| model | ranks | float32 weights | a block | largest tensor | shards of a rank | peak of a rank |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for each in of_shapes:
        values = [each[name] / GIB for name in ("whole", "block", "largest", "shards", "peak")]
        lines.append(f"| {each['model']} | {each['ranks']} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    lines += [
        "", f"Measured with Qwen2.5-{of_ranks['model']}'s shapes, {of_ranks['weights'] / GIB:.2f} GiB of float32 "
        f"weights, the largest tensor {of_ranks['largest'] / GIB:.2f} GiB: the most memory of a process above what it "
        "held before the load.", "",
        "| ranks | shards | peak, whole model first | peak | left | all ranks, whole first | all ranks |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for load in of_ranks["loads"]:
        whole, shards = ([peak for peak, _ in load[way]] for way in ("whole", "shards"))
        left = max(left for _, left in load["shards"])
        values = [of_ranks["weights"] / load["ranks"], max(whole), max(shards), left, sum(whole), sum(shards)]
        lines.append(f"| {load['ranks']} | " + " | ".join(f"{value / GIB:.2f}" for value in values) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["7B", "32B", "72B"], choices=QWEN2_5)
    parser.add_argument("--measured", default="0.5B", choices=QWEN2_5)
    parser.add_argument("--out", type=Path, default=Path("runs/model_loading"))
    args = parser.parse_args()
    header = f"`python -m benchmarks.model_loading {' '.join(sys.argv[1:])}`, {machine_text()}."
    of_shapes, of_ranks = counted(args.sizes), measured(args.measured)
    numbers = {"header": header, "counted": of_shapes, "measured": of_ranks}
    write_page(args.out, page(of_shapes, of_ranks, header), numbers)


if __name__ == "__main__":
    main()
