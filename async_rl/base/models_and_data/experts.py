"""Reads from a model folder which layers are mixtures of experts, without loading weights or transformers."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError

_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The keys of config.json, of various model families, for the number of experts that a router chooses from."""
_CHOSEN_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_EXPERT = re.compile(r"\blayers\.(\d+)\.(?:.+\.)?experts\.")
"""Matches the name of an expert's weight. Shared experts, which every token uses, are called `shared_experts`."""

HINT = "set rollout.routing: ignore, with which the learner's routers choose by themselves"


@dataclass(frozen=True, slots=True)
class Experts:
    """Where a mixture of experts has routers, and what they choose from."""

    layers: tuple[int, ...]
    """The numbers of the layers with a router, ascending. The other layers are dense."""
    count: int
    """The number of experts in a layer."""
    per_token: int
    """The number of experts that a router chooses for a token."""

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """The type of recorded expert numbers."""
        return np.uint8 if self.count <= 256 else np.uint16


def recorded_experts(config: Config) -> Experts | None:
    """Return the policy's routers if their choices are recorded and replayed (rollout.routing replay).

    None: rollout.routing is ignore, or the policy has no routers.
    """
    return experts_of(config.model.path) if config.rollout.routing == "replay" else None


def experts_of(path: str) -> Experts | None:
    """Return the routers of the model in the folder `path`; None if it has no routers.

    Raises:
        ConfigError: config.json and the names of the weights disagree on whether the model has experts, or config.json
            does not say how many experts a token uses.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        return None  # whoever loads the model says what is missing
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    layers = {int(match[1]) for name in _weight_names(folder) if (match := _EXPERT.search(name))}
    count, per_token = (_first_of(text, keys) for keys in (_COUNT_KEYS, _CHOSEN_KEYS))
    if not layers and count < 2:
        return None
    if not layers or not count or not per_token:
        raise ConfigError(
            f"{folder}: in config.json a layer has {count} experts and a token uses {per_token} of them, and "
            f"{len(layers)} layers have weights with `experts` in their names. This family is not known: {HINT}"
        )
    depth = text.get("num_hidden_layers", max(layers) + 1)  # later ones, as DeepSeek has, only predict further tokens
    return Experts(tuple(sorted(layer for layer in layers if layer < depth)), count, per_token)


def _first_of(config: dict[str, Any], keys: tuple[str, ...]) -> int:
    """Return the value of the first key that is set.

    Some families have a list with one value per layer; its largest counts.
    """
    value = next((config[key] for key in keys if config.get(key)), 0)
    return max(value) if isinstance(value, list) else int(value)


def _weight_names(folder: Path) -> Iterator[str]:
    """Yield the names of all tensors, from the index of the weight files or, without one, from the files' headers."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        yield from json.loads(index.read_text(encoding="utf-8")).get("weight_map", {})
        return
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            (size,) = struct.unpack("<Q", opened.read(8))
            yield from json.loads(opened.read(size))
