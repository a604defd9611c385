"""Tells how much memory a learner rank may use, and by that whether it checkpoints gradients."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import AutoConfig

from async_rl.config import Config
from async_rl.storage.model_folder import ROLES, weight_shapes
from learner.memory.optimizer_state import MASTER_BYTES, state_bytes
from learner.memory.rank_memory import RankMemoryEstimate

IN_TURNS_BYTES = 5 * 2**30
"""The bytes of a GPU that a server holds after it has let go of weights and KV cache: CUDA graphs, say. An estimate."""
GRAPHS_BYTES = 2 * 2**30
"""The bytes that a server takes of a GPU beside its share from its start on: CUDA context and graphs. An estimate."""
_MOST_REPLIES, _PREFILL_TOKENS = 1024, 8192
"""The engines' largest batches, of replies and of prompts."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_SMALL = 2
"""A run is small if what it needs at the very most is so many times below the room."""


def batch_bytes(config: Config, model: Any) -> int:
    """Return what a server takes of a GPU only for its fullest batch, given the text part of the model's config.

    Logits in float32, their softmax, its logarithm and a bfloat16 product: 14 bytes a reply and word. Or gate, up and
    their product of a batch of prompts, in bfloat16.
    """
    replies = min(config.max_running_replies, _MOST_REPLIES)
    prompts = 6 * _PREFILL_TOKENS * int(getattr(model, "intermediate_size", 0) or 4 * model.hidden_size)
    return max(14 * replies * int(model.vocab_size), prompts // config.placement.rollout.tp)


def host_bytes() -> int:
    """Return the memory of this host, or of the container in which this process runs."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    return min(total, int(limit)) if limit.isdigit() else total


def free_room(config: Config, device: torch.device) -> int:
    """Return the bytes that a rank that is about to load its models may use on `device`. Its servers are up already.

    Where others hold much of a GPU, they are the servers of a run at once, whose fullest batch is to come.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if config.shares_gpus:
            return total - IN_TURNS_BYTES
        if total - free < config.rollout.mem_fraction * total / 2:
            return free
        model = AutoConfig.from_pretrained(config.model.path).get_text_config()
        servers = 1 if config.placement.colocated else config.placement.num_servers
        return free - servers * batch_bytes(config, model)
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


def with_checkpointing(config: Config, device: torch.device) -> Config:
    """Return the configuration with true or false for learner.gradient_checkpointing auto. Collective.

    It is true if one rank has no room for the activations of a full micro-batch.
    """
    if config.learner.gradient_checkpointing != "auto":
        return config
    room = free_room(config, device)
    fits = is_surely_small(config, room) or RankMemoryEstimate(config, device.type).fits_plain(room)
    wanted = torch.tensor(float(not fits))
    dist.all_reduce(wanted, dist.ReduceOp.MAX)
    return replace(config, learner=replace(config.learner, gradient_checkpointing=bool(wanted)))
