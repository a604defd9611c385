"""Attention of one new token per sequence for all sequences at once, for SGLang's torch_native backend on CPU.

The stock backend calls torch once per sequence and layer; with hundreds of short sequences in a batch those calls,
not the arithmetic, take most of the server's time. `install` puts `BatchedDecodeBackend` in its place, which does the
same arithmetic for padded slices of the batch and leaves every other case to the stock code.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

SLICE_TOKENS = 16_384
"""Cached tokens (sequences * longest) gathered at a time: small enough for a CPU's caches."""


def decode_attention(
    query: Tensor,  # [B, H, D]: one token per sequence
    k_cache: Tensor,  # [N, K, D]: K heads, each shared by H / K query heads
    v_cache: Tensor,  # [N, K, D]
    slots: Tensor,  # [B, S] rows of the caches that hold a sequence's tokens, valid up to its length
    lengths: Tensor,  # [B] tokens of each sequence, the new one included
    scaling: float | None,
) -> Tensor:  # [B, H, D]
    """softmax(q k^T * scaling) v over each sequence's cached tokens."""
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
    valid = torch.arange(slots.shape[1]) < lengths[:, None]  # [B, S]
    slots = torch.where(valid, slots, slots[:, :1])  # padding reads the sequence's own cache, never another's
    keys, values = (  # [B, K, S, D]
        torch.index_select(cache, 0, slots.reshape(-1)).view(*slots.shape, *cache.shape[1:]).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    shared = query.view(batch, keys.shape[1], -1, dim)  # [B, K, H / K, D]: heads that share keys are its "positions"
    return scaled_dot_product_attention(
        shared, keys.to(query.dtype), values.to(query.dtype), attn_mask=valid[:, None, None, :], scale=scaling
    ).reshape(batch, heads, -1)


class BatchedDecodeBackend(TorchNativeAttnBackend):
    """Overrides the two loops over sequences; their arguments are SGLang's."""

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Tensor | None = None, **options: Any,
    ) -> Tensor:
        if encoder_lens is not None or options.get("sliding_window_size") is not None:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, **options
            )
        slots = req_to_token[req_pool_indices, : int(seq_lens.max())]
        output.copy_(decode_attention(query, k_cache, v_cache, slots, seq_lens, options["scaling"]))
        return output

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, extend_prefix_lens: Tensor, extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None, **options: Any,
    ) -> Tensor:
        """Samples of one prompt find all of it but its last token in the prefix cache: one new token each."""
        plain = encoder_lens is None and options["causal"] and options.get("sliding_window_size") is None
        single = extend_seq_lens == (1 if plain else -1)  # [B]
        tokens = torch.repeat_interleave(single, extend_seq_lens)  # [tokens]: is it the only new one of its sequence?
        if single.any():
            self._run_sdpa_forward_decode(
                query[tokens], part := torch.empty_like(output[tokens]), k_cache, v_cache, req_to_token,
                req_pool_indices[single], seq_lens[single], scaling=options["scaling"],
            )
            output[tokens] = part
        if not single.all():
            rest = ~single
            part = super()._run_sdpa_forward_extend(
                query[~tokens], torch.empty_like(output[~tokens]), k_cache, v_cache, req_to_token,
                req_pool_indices[rest], seq_lens[rest], extend_prefix_lens[rest], extend_seq_lens[rest],
                encoder_lens, **options,
            )
            output[~tokens] = part
        return output


def install() -> None:
    """Serve `--attention-backend torch_native` by the batched one. Call in the scheduler's process before it starts."""
    ATTENTION_BACKENDS["torch_native"] = BatchedDecodeBackend
