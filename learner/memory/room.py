"""Tells how much memory a learner rank may use, and whether a run is so small that it fits without a computation."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig

from async_rl.config import Config
from async_rl.storage.model_folder import ROLES, weight_shapes
from learner.memory.optimizer_state import MASTER_BYTES, state_bytes

IN_TURNS_BYTES = 5 * 2**30
"""The bytes of a GPU that a server holds after it has let go of weights and KV cache: CUDA graphs, say. An estimate."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SMALL = 2
"""A run is small if what it needs at the very most is so many times below the room."""


def host_bytes() -> int:
    """Return the memory of this host, or of the container in which this process runs."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return min(total, int(limit)) if limit.isdigit() else total


def free_room(config: Config, device: torch.device) -> int:
    """Return the bytes that a rank that is about to load its models may use on `device`. Its servers are up already."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - IN_TURNS_BYTES if config.shares_gpus else free
    learner = config.placement.learner
    return min(psutil.virtual_memory().available, host_bytes()) * learner.nodes // learner.ranks


def is_surely_small(config: Config, room: int) -> bool:
    """Return whether all networks of the learner, not split, and a full micro-batch need but a fraction of `room`."""
    paths = {config.model.path, *(getattr(config, key.partition(".")[0]).path for key in ROLES)} - {""}
    tokens, longest = config.learner.max_tokens_per_forward, config.longest_tokens
    held = numbers = 0
    for path in paths:
        shapes = weight_shapes(Path(path)).values()
        trained = 2 * MASTER_BYTES * sum(torch.Size(shape).numel() for shape in shapes)
        held += 2 * (trained + state_bytes(config.learner, shapes))  # also as a critic or a reference
        model = AutoConfig.from_pretrained(path).get_text_config()
        layers, heads = model.num_hidden_layers, model.num_attention_heads
        widest = max(shape[-1] for shape in shapes if shape)
        pairs = longest * (3 * layers * heads if config.model.attn_implementation == "eager" else 4)
        numbers += 2 * tokens * (layers * max(40 * model.hidden_size, 12 * widest) + pairs)
    return _SMALL * (held + 4 * numbers) < room
