"""Attention of one new token per sequence in plain torch, for all sequences of a batch in one call.

It needs no SGLang, so it is not in server_changes.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SLICE_TOKENS = 16_384
"""The most cached tokens (sequences times the longest length) gathered at a time; that many fit into a CPU's caches."""


def decode_attention(
    query: Tensor,  # [B, H, D]: one token per sequence
    k_cache: Tensor,  # [N, K, D]: K heads, each shared by H / K query heads
    v_cache: Tensor,  # [N, K, D]
    slots: Tensor,  # [B, S] rows of the caches that hold a sequence's tokens, valid up to its length
    lengths: Tensor,  # [B] tokens of each sequence, the new one included
    scaling: float | None,
) -> Tensor:  # [B, H, D]
    """Return the attention of each sequence's new token to its cached tokens: softmax(q k^T * scaling) v, [B, H, D]."""
    order = torch.argsort(lengths)
    sorted_lengths = lengths[order].tolist()
    output = torch.empty_like(query)
    start = 0
    while start < len(sorted_lengths):
        stop = start + 1
        while stop < len(sorted_lengths) and (stop + 1 - start) * sorted_lengths[stop] <= SLICE_TOKENS:
            stop += 1
        rows = order[start:stop]
        output[rows] = _padded_attention(
            query[rows], k_cache, v_cache, slots[rows, : sorted_lengths[stop - 1]], lengths[rows], scaling
        )
        start = stop
    return output


def _padded_attention(
    query: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, lengths: Tensor, scaling: float | None
) -> Tensor:
    batch, heads, dim = query.shape
    valid = torch.arange(slots.shape[1], device=lengths.device) < lengths[:, None]  # [B, S]
    slots = torch.where(valid, slots, slots[:, :1])  # padding reads the cache of the same sequence
    keys, values = (  # [B, K, S, D]
        torch.index_select(cache, 0, slots.reshape(-1)).view(*slots.shape, *cache.shape[1:]).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    shared = query.view(batch, keys.shape[1], -1, dim)  # [B, K, H / K, D]: heads with the same keys
    return scaled_dot_product_attention(
        shared, keys.to(query.dtype), values.to(query.dtype), attn_mask=valid[:, None, None, :], scale=scaling
    ).reshape(batch, heads, -1)
