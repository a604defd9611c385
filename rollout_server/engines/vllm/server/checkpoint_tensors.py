"""The tensors of the checkpoint that a vLLM server was started with, and the check of an update against them."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def checkpoint_shapes(folder: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in a model folder, from the headers of its safetensors files."""
    shapes: dict[str, list[int]] = {}
    for path in weight_files(folder):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        shapes |= {name: entry["shape"] for name, entry in header.items() if name != "__metadata__"}
    return shapes


def weight_files(folder: Path) -> Sequence[Path]:
    """Return the safetensors files of a model folder: those that its index names, else model.safetensors, else all."""
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        return [folder / name for name in sorted(set(weight_map.values()))]
    return [folder / _SINGLE] if (folder / _SINGLE).is_file() else sorted(folder.glob("*.safetensors"))


def check_tensors(tensors: dict[str, Tensor], expected: dict[str, list[int]], is_tied: bool) -> None:
    """Raise ValueError unless `tensors` have the names and shapes `expected`; a tied output layer may be left out."""
    ignored = {"lm_head.weight"} if is_tied else set()
    got = {name: list(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        f"{name} must have shape {expected.get(name, '(none: no such tensor)')}, got {got.get(name, 'none')}"
        for name in sorted((expected.keys() | got.keys()) - ignored) if expected.get(name) != got.get(name)
    ]
    if wrong:
        raise ValueError(f"the update differs from the checkpoint in {len(wrong)} tensors: {'; '.join(wrong[:5])}")
