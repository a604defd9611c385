"""The sizes of a rollout server: of its KV cache on a CPU, where it shares the host's memory, and of its batches."""

from __future__ import annotations

from typing import Any

from async_rl.base.config import Config

_KV_SHARE = 0.25
"""The share of the host's free memory that all KV caches may take; the learner needs the rest."""


def kv_tokens(config: Config, token_bytes: int, row_tokens: int, free_memory_bytes: int) -> int:
    """Return for how many tokens a server's KV cache has room: all rows in flight if memory allows, else fewer.

    There is room for one row at least.

    Args:
        token_bytes: memory for one token; see kv_token_bytes.
        row_tokens: tokens that are set aside for one row, its prompt included.
    """
    affordable = int(_KV_SHARE * free_memory_bytes / config.placement.servers_per_node / token_bytes)
    return max(row_tokens, min(config.max_running_replies * row_tokens, affordable))


MAX_GRAPH_REPLIES = 1024
"""The largest decode batch for which a server on a GPU captures a CUDA graph. Each size takes time at the start."""


def graph_replies(config: Config) -> int:
    """Return the size of the largest decode batch that is worth a CUDA graph: all replies of a server, up to a limit.

    The engines' own choice, 256 or 512, leaves larger batches without a graph, and captures sizes that never occur.
    """
    return min(config.max_running_replies, MAX_GRAPH_REPLIES)


def kv_token_bytes(model: Any, dtype: str, tp: int = 1) -> int:
    """Return the bytes that one token takes in the KV cache of each of the `tp` ranks of a server.

    A rank holds one head at least: of fewer heads than ranks each is there more than once.

    Args:
        model: the text part of the model's config.
    """
    heads = int(getattr(model, "num_key_value_heads", None) or model.num_attention_heads)
    of_rank = max(1, heads // tp)
    return 2 * int(model.num_hidden_layers) * of_rank * head_size(model) * (4 if dtype == "float32" else 2)


def head_size(model: Any) -> int:
    """Return the size of one attention head of a model, from the text part of its transformers config."""
    return int(getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads)
