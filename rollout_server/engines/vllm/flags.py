"""The flags of a vLLM server, and the models that it can't serve."""

from __future__ import annotations

import json
import os
from typing import Any

from async_rl.config import Config
from async_rl.config.check import check

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes for which vLLM 0.32 has an attention kernel on CPUs."""
_SET_HERE = (
    "model", "host", "port", "served-model-name", "tensor-parallel-size", "tokens-only", "logprobs-mode",
    "worker-extension-cls", "weight-transfer-config", "scheduling-policy", "middleware", "generation-config",
)
"""The flags that this project sets and relies on."""
_RESERVED_TOKENS = 8
"""The number of positions of a context beyond the longest prompt with its answer."""
_BLOCK_TOKENS = 32
"""The size of a KV block on CPUs, the smallest for which vLLM has a kernel: long blocks waste memory."""
_MAX_RUNNING = 1024
"""The largest number of answers that one server runs at once unless rollout.server_args says more."""
_KV_SHARE = 0.25
"""The share of a CPU host's free memory that all KV caches may take; the learner needs the rest."""

Flags = dict[str, Any]


def server_flags(config: Config, model: Any, *, on_gpu: bool, free_memory_bytes: int) -> Flags:
    """Return vLLM's flags, without the port. `model` is the text part of the model's transformers config.

    Raises:
        ConfigError: rollout.server_args holds a flag that is set here.
    """
    user = {key.replace("_", "-"): value for key, value in config.rollout.server_args.items()}
    check(
        not set(user) & set(_SET_HERE), "rollout.server_args", config.rollout.server_args,
        f"without {', '.join(_SET_HERE)}", "async-rl sets these: leave them out.",
    )
    positions = getattr(model, "max_position_embeddings", None)
    length = config.longest_tokens + _RESERVED_TOKENS
    dtype = config.model.dtype if config.model.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    flags: Flags = {
        "model": os.path.abspath(config.model.path), "host": config.network.host, "dtype": dtype,
        "seed": config.run.seed,
        "max-model-len": min(length, positions or length),
        "max-num-seqs": min(_MAX_RUNNING, _rollouts(config)),
        "tokens-only": True,  # tokens in, tokens out: nothing to detokenize
        "generation-config": "vllm",  # not the model's: it narrows the support
        "logprobs-mode": "processed_logprobs",  # at the sampling temperature
        "scheduling-policy": "priority",
        "worker-extension-cls": "weight_receiver.WorkerExtension",
        "weight-transfer-config": {"backend": "async_rl"},
        "disable-uvicorn-access-log": True,
    }
    if on_gpu:
        flags |= {
            "gpu-memory-utilization": config.rollout.mem_fraction,
            "tensor-parallel-size": config.placement.rollout.tp,
            # With it, a forward runs while the tokens of the one before are read. Whether these get the right version
            # when a pause in place comes between has been tested only without it.
            "no-async-scheduling": config.weight_sync.on_update == "in_place",
        }
    else:
        flags |= {
            "enforce-eager": True,  # compiling takes most of the start, and tiny models gain little
            "block-size": _BLOCK_TOKENS,
            "kv-cache-memory-bytes": _kv_bytes(config, model, dtype, free_memory_bytes),
        }
    return flags | user


def _rollouts(config: Config) -> int:
    """Return the largest number of answers that can be in flight at once."""
    groups = min(config.rollout.concurrency, config.max_slots)
    return groups * config.rollout.group_size + config.eval.size * config.eval.samples


def _kv_bytes(config: Config, model: Any, dtype: str, free_memory_bytes: int) -> int:
    """Return the size of the KV cache: for all rollouts in flight if memory allows, for one rollout at least."""
    heads = getattr(model, "num_key_value_heads", None) or model.num_attention_heads
    token_bytes = 2 * model.num_hidden_layers * heads * head_size(model) * (4 if dtype == "float32" else 2)
    blocks = -(-(config.longest_tokens + _RESERVED_TOKENS) // _BLOCK_TOKENS) + 1  # vLLM keeps one block for itself
    rollout_bytes = blocks * _BLOCK_TOKENS * token_bytes
    affordable = int(_KV_SHARE * free_memory_bytes / config.placement.servers_per_node)
    return max(rollout_bytes, min(_rollouts(config) * rollout_bytes, affordable))


def head_size(model: Any) -> int:
    """Return the size of one attention head of a model, from the text part of its transformers config."""
    return int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)


def command_line(flags: Flags) -> list[str]:
    """Return `--key value ...`. True gives a flag without value, False no flag, a list several values, a dict JSON."""
    words: list[str] = []
    for key, value in flags.items():
        if value is False:
            continue
        words.append(f"--{key}")
        if isinstance(value, list | tuple):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words
