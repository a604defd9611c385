"""The memory that a learner rank may use, and a quick bound that says whether a run fits without measuring it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig

from async_rl.base.config import Config
from async_rl.base.models_and_data.model_folder import weight_shapes

GIB = 2**30
IN_TURNS_BYTES = 5 * GIB
"""GPU memory of a server that has released weights and KV cache, such as CUDA graphs. An estimate."""
PROCESS_BYTES = GIB // 2
"""CPU memory of a process without weights: the interpreter and its libraries."""
STATE_BYTES = 20
"""Bytes for each trained weight: weight, gradient, AdamW's two moments and an average, in float32."""
_MOST_REPLIES, _PREFILL_TOKENS = 1024, 8192
"""The engines' largest batches, of replies and of prompts."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def networks(config: Config) -> dict[str, tuple[str, str]]:
    """Return {role: (key, path)} of the learner's networks, the policy first: the setting of the model, and its value.
    """
    algorithm, model = config.algorithm, config.model
    paths = {"policy": ("model.path", model.path)}
    if algorithm.advantage_entry.needs_critic:
        paths["critic"] = ("critic.path", config.critic.path or model.path)
    if algorithm.kl.kind != "none" and (not model.lora.rank or config.reference.path):
        paths["reference"] = ("reference.path", config.reference.path or model.path)
    if config.reward_model.path:
        paths["reward model"] = ("reward_model.path", config.reward_model.path)
    return paths


def most_state_bytes(config: Config) -> int:
    """Return an upper bound of the bytes of all networks' weights, gradients and optimizer state, as AdamW has."""
    return STATE_BYTES * sum(_num_weights(path) for _, path in networks(config).values())


def surely_fits(config: Config, room: int) -> bool:
    """Return whether a rough upper bound of a rank's memory fits `room` bytes. Saves the seconds of measuring a pass.
    """
    longest, needed = config.longest_tokens, most_state_bytes(config)
    for _, path in networks(config).values():
        model = AutoConfig.from_pretrained(path).get_text_config()
        # for each token a layer makes about as many numbers as it has weights for each of its inputs
        numbers = 4 * _num_weights(path) // model.hidden_size
        is_eager = config.model.attn_implementation == "eager"
        pairs = longest * (3 * model.num_hidden_layers * model.num_attention_heads if is_eager else 4)
        needed += 4 * config.learner.max_tokens_per_forward * (numbers + pairs)
    return 2 * needed < room


def surely_fits_host(config: Config, total: int) -> bool:
    """Return whether rough upper bounds of all ranks and servers of a run without GPUs fit a host with `total` bytes.
    """
    model, ranks = AutoConfig.from_pretrained(config.model.path).get_text_config(), config.placement.learner.ranks
    kv_bytes = 8 * model.num_hidden_layers * model.hidden_size * config.max_running_replies * config.longest_tokens
    server = 4 * _num_weights(config.model.path) + kv_bytes + PROCESS_BYTES
    return surely_fits(config, (total - 2 * config.placement.num_servers * server) // ranks - PROCESS_BYTES)


def _num_weights(path: str) -> int:
    return sum(torch.Size(shape).numel() for shape in weight_shapes(Path(path)).values())


def batch_bytes(config: Config, model: Any) -> int:
    """Return the GPU memory that a server's fullest batch takes. `model` is the text part of the model's config.

    It is the larger of two: logits in float32, their softmax, its logarithm and a bfloat16 product, 14 bytes for each
    reply and word; or gate, up and their product of a batch of prompts, in bfloat16.
    """
    replies = min(config.max_running_replies, _MOST_REPLIES)
    prompts = 6 * _PREFILL_TOKENS * int(getattr(model, "intermediate_size", 0) or 4 * model.hidden_size)
    return max(14 * replies * int(model.vocab_size), prompts // config.placement.rollout.tp)


def host_bytes() -> int:
    """Return the memory of this host, or of the container that this process runs in."""
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.is_file() else "max"
    total = psutil.virtual_memory().total
    return min(total, int(limit)) if limit.isdigit() else total


def free_room(config: Config, device: torch.device) -> int:
    """Return the bytes on `device` that a rank may use, before it loads its models and after its servers have started.

    If other processes use much of a GPU, they are servers. Then memory is left for their fullest batch.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if config.shares_gpus:
            return total - IN_TURNS_BYTES
        if total - free < config.rollout.gpu_memory_utilization * total / 2:
            return free
        model = AutoConfig.from_pretrained(config.model.path).get_text_config()
        servers = 1 if config.placement.colocated else config.placement.num_servers
        return free - servers * batch_bytes(config, model)
    learner = config.placement.learner
    return min(psutil.virtual_memory().available, host_bytes()) * learner.nodes // learner.ranks
