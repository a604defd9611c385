"""The command-line flags of a vLLM server, and the sizes of attention heads for which it has kernels on CPUs."""

from __future__ import annotations

import os
from typing import Any

from async_rl.base.config import Config
from rollout_server.engines.kv_cache import graph_replies, kv_token_bytes, kv_tokens

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes for which vLLM 0.32 has an attention kernel on CPUs."""
_RESERVED_TOKENS = 8
"""The number of positions of a context beyond the longest prompt with its reply."""
_BLOCK_TOKENS = 32
"""The size of a KV block on CPUs, the smallest for which vLLM has a kernel: long blocks waste memory."""
_MAX_RUNNING = 1024
"""The largest number of replies that one server runs at once unless rollout.server_args says more."""

Flags = dict[str, Any]


def server_flags(config: Config, model: Any, *, on_gpu: bool, free_memory_bytes: int, seed: int) -> Flags:
    """Return vLLM's flags {name: value} without the port; rollout.server_args take precedence.

    `model` is the text part of the model's transformers config.
    """
    positions = getattr(model, "max_position_embeddings", None)
    length = config.longest_tokens + _RESERVED_TOKENS
    dtype = config.model.dtype if config.model.dtype != "auto" else "bfloat16" if on_gpu else "float32"
    flags: Flags = {
        "model": os.path.abspath(config.model.path), "host": config.network.host, "dtype": dtype,
        "seed": seed,
        "max-model-len": min(length, positions or length),
        "max-num-seqs": min(_MAX_RUNNING, config.max_running_replies),
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
            "gpu-memory-utilization": config.rollout.gpu_memory_utilization,
            "tensor-parallel-size": config.placement.rollout.tp,
            "max-cudagraph-capture-size": graph_replies(config),
            # With it, a forward runs while the tokens of the one before are read. Whether these get the right version
            # when a pause in place comes between has been tested only without it.
            "no-async-scheduling": config.weight_sync.on_update == "in_place",
        }
    else:
        blocks = -(-length // _BLOCK_TOKENS) + 1  # vLLM keeps one block for itself
        token_bytes = kv_token_bytes(model, dtype)
        flags |= {
            "enforce-eager": True,  # compiling takes most of the start, and tiny models gain little
            "block-size": _BLOCK_TOKENS,
            "kv-cache-memory-bytes": token_bytes * kv_tokens(
                config, token_bytes, blocks * _BLOCK_TOKENS, free_memory_bytes
            ),
        }
    return flags | {key.replace("_", "-"): value for key, value in config.rollout.server_args.items()}
