"""A transport that writes down, after each push to all, what servers hold; and what they must, from model folders."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from async_rl.base.seams import TransportEntry
from async_rl.base.weights.parcels import checksum
from async_rl.base.weights.transport import BroadcastTransport

GLOO = "tests.kit.engines.noted_pushes:NOTED_GLOO"
"""A value of weight_sync.transport: gloo, with notes in the run directory."""
NOTES = "served_sums.jsonl"
VOCABULARY_BLOCK = 64
"""SGLang pads embeddings with zeros to a multiple of so many rows."""
FUSED = (
    (r"self_attn\.([qkv])_proj", "self_attn.qkv_proj", "qkv"),
    (r"mlp\.(gate|up)_proj", "mlp.gate_up_proj", ("gate", "up")),
)
"""(pattern of the names of a folder, SGLang's name of the rows one after the other, their order)."""
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class NotingTransport(BroadcastTransport):
    """Asks every server for the checksums of its weights after each push to all of them."""

    def end_push(self, served: int | None) -> None:
        super().end_push(served)
        if served is not None and self.members.purpose == "push":
            sums = {name: self._sums(name) for name in self.members.names}
            with (self.config.run_dir / NOTES).open("a") as file:
                file.write(json.dumps({"version": served, "sums": sums}) + "\n")

    def _sums(self, name: str) -> dict[str, str]:
        admin: Any = self.members.admin(name)
        sums: dict[str, str] = admin.sums_of_weights()
        return sums


NOTED_GLOO = TransportEntry(
    open=partial(NotingTransport, backend="gloo"), delivers="gloo", devices=("cpu",), stages=True, carries_parcels=True
)


def noted(run_dir: Path) -> dict[int, dict[str, dict[str, str]]]:
    """{version: {server: {name: checksum}}} of the pushes of a run."""
    lines = map(json.loads, (run_dir / NOTES).read_text().splitlines())
    return {line["version"]: line["sums"] for line in lines}


def expected_sums(engine: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, str]:
    """The checksums of an engine's weights that serves the tensors of a model folder as `dtype`."""
    served = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if engine == "sglang":
        served = as_sglang(served)
    return {name: str(checksum(tensor.contiguous())) for name, tensor in served.items()}


def as_sglang(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a Qwen model folder as SGLang's model has them, on one rank: fused layers, padded embeddings."""
    served: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    experts: dict[str, dict[int, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        if of_expert := EXPERT.fullmatch(name):
            layer, number, kind = of_expert.groups()
            experts[layer][int(number)][kind] = tensor
            continue
        for pattern, fused, _ in FUSED:
            if found := re.search(pattern, name):
                parts[name.replace(found[0], fused)][found[1]] = tensor
                break
        else:
            served[name] = padded(tensor) if "embed_tokens" in name or "lm_head" in name else tensor
    for name, of_name in parts.items():
        order = next(order for _, fused, order in FUSED if fused in name)
        served[name] = torch.cat([of_name[kind] for kind in order])
    for layer, of_layer in experts.items():
        numbered = [of_layer[number] for number in range(len(of_layer))]
        served[f"{layer}.w13_weight"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in numbered])
        served[f"{layer}.w2_weight"] = torch.stack([e["down"] for e in numbered])
    return served


def padded(embeddings: Tensor) -> Tensor:
    missing = -len(embeddings) % VOCABULARY_BLOCK
    return torch.cat([embeddings, embeddings.new_zeros(missing, embeddings.shape[1])])
