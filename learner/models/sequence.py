"""Sequence parallelism: the n ranks of a group have a slice of s = S / n tokens of every row. Attention exchanges data:

    heads     all-to-all from [heads, s] to [heads / n, S] and back, so that each rank computes some heads of whole
              rows (DeepSpeed-Ulysses, arXiv 2309.14509); key and value heads are repeated where they are too few
    keys      where the heads can't be divided by n: all ranks gather keys and values, and keep their own queries

Every other layer works on single tokens and needs no other rank. Masks and lengths are of whole rows. Values of
response tokens are gathered at the end, so that every rank of the group computes the whole loss. Its gradient for a
rank's own tokens is multiplied by n: FSDP averages it over all ranks, and n ranks belong to one share of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.modeling_flash_attention_utils import _flash_attention_forward

from async_rl.base.errors import AsyncRLError, ConfigError
from learner.packing import (
    PADDING,
    RECURRENT,
    SPLIT_PREFIX,
    WHOLE,
    WINDOWS,
    PackedTokens,
    attention_mask,
    block_mask,
    kernel_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitAttention:
    """What a layer needs to compute attention over whole rows. One object serves all layers of a forward pass."""

    ranks: DeviceMesh
    swaps_heads: bool
    mask: Tensor | BlockMask | None
    keys: slice
    """The range of tokens whose keys are needed."""
    lengths: dict[str, Any]
    """The lengths of the documents, for kernels that take no mask."""


def check_splittable(lm: Any, key: str, path: str) -> None:
    """Check that sequence parallelism supports the model in `path`, the value of the setting `key`.

    Raises:
        ConfigError: a layer is not full causal attention (windows, recurrence), its attention can't be replaced, or the
            embeddings are not a plain table.
    """
    keys = {name: value for name, value in lm.config.to_dict().items() if value}
    kinds = set(keys.get("layer_types") or ()) - {"full_attention"}
    found = sorted(name for name in keys if name in WINDOWS or name.startswith(RECURRENT))
    reason = ""
    if found:
        reason = f"its layers have windows or are recurrent ({found[0]} = {keys[found[0]]!r:.40})"
    elif kinds:
        reason = f"it has layers of type {', '.join(sorted(kinds))}"
    elif not lm.is_backend_compatible():
        reason = "its attention can't be replaced in transformers (_supports_attention_backend)"
    elif type(lm.get_input_embeddings()) is not nn.Embedding:
        reason = f"its embeddings are a {type(lm.get_input_embeddings()).__name__}, not a torch.nn.Embedding"
    if reason:
        raise ConfigError(
            f"learner.sequence_parallel must be 1 with {key} {path}, a model of type {lm.config.model_type}: {reason}. "
            "Only full causal attention is computed over split rows. Use e.g. a model of the Llama or Qwen3 family"
        )


def split_attention(lm: Any) -> None:
    """Replace the attention of the model, in place, by one that takes slices of rows."""
    kernel = kernel_of(lm)
    AttentionInterface.register(SPLIT_PREFIX + kernel, partial(_attention, kernel))
    lm.config._attn_implementation = SPLIT_PREFIX + kernel


def split_states(lm: Any, inputs: PackedTokens, dtype: torch.dtype, ranks: DeviceMesh) -> Tensor:
    """Return the m last hidden states that `owners` assigns to this rank, [m, hidden]. Collective."""
    rows, width = inputs.tokens.shape
    size = -(-width // ranks.size())
    first = ranks.get_local_rank() * size
    padding = (0, size * ranks.size() - width)
    positions = inputs.positions
    if positions is None:
        positions = torch.arange(width, device=inputs.tokens.device).expand(rows, width)
    positions = F.pad(positions, padding)
    segments = None if inputs.segments is None else F.pad(inputs.segments, padding, value=PADDING)
    own = slice(first, first + size)
    states = lm.base_model(
        F.pad(inputs.tokens, padding)[:, own], attention_mask=None, position_ids=positions[:, own], use_cache=False,
        split_attention=_describe(lm, positions, segments, own, dtype, ranks),
    ).last_hidden_state
    where = inputs.where[owners(inputs, ranks) == ranks.get_local_rank()]
    return states.flatten(0, 1)[where // width * size + where % width - first]


def own_slice(values: Tensor, padding: int, ranks: DeviceMesh) -> Tensor:
    """Return this rank's slice of the values of all tokens. [B, S, ...] -> [B, s, ...]; the last rank's may be padded.
    """
    size = -(-values.shape[1] // ranks.size())
    own = values[:, ranks.get_local_rank() * size :][:, :size]
    missing = values.new_full((values.shape[0], size - own.shape[1], *values.shape[2:]), padding)
    return torch.cat([own, missing], 1)


def owners(inputs: PackedTokens, ranks: DeviceMesh) -> Tensor:
    """Return for each response token the rank of the group that computes the hidden state predicting it, [N]."""
    width = inputs.tokens.shape[1]
    return inputs.where % width // -(-width // ranks.size())


def gather_tokens(own: Tensor, of: Tensor, ranks: DeviceMesh) -> Tensor:
    """Return the values of all N response tokens on every rank of the group, [N], with gradient. Collective.

    Args:
        own: [m] values of this rank's tokens.
        of: [N] the result of `owners`.
    """
    values: Tensor = _GatherTokens.apply(own, of == ranks.get_local_rank(), ranks)
    return values


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, is_own: Tensor, ranks: DeviceMesh) -> Tensor:
        ctx.size = ranks.size()
        ctx.save_for_backward(is_own)
        values = own.new_zeros(len(is_own))
        values[is_own] = own
        dist.all_reduce(values, group=ranks.get_group())
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (is_own,) = ctx.saved_tensors
        return grad[is_own] * ctx.size, None, None


def _describe(
    lm: Any, positions: Tensor, segments: Tensor | None, own: slice, dtype: torch.dtype, ranks: DeviceMesh
) -> SplitAttention:
    """Return what attention needs for these rows.

    Args:
        positions: [B, S] position of each token in its row.
        segments: [2, B, S] as in PackedTokens; None: all packs are plain causal.
        own: this rank's tokens.
    """
    kernel, config = kernel_of(lm), lm.config
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    swaps_heads = head_repeats(heads, kv_heads, ranks.size()) > 0
    queries = WHOLE if swaps_heads else own
    mask: Tensor | BlockMask | None = None
    lengths: dict[str, Any] = {}
    keys = WHOLE
    is_causal = segments is None
    if segments is None:  # one document a row
        segments = torch.zeros_like(positions[:1]).expand(2, 1, -1)
    if "flash" in kernel:
        lengths, keys = document_lengths(positions, *queries.indices(positions.shape[1])[:2])
    elif kernel == "flex_attention":
        mask = block_mask(segments, queries)
    elif not (is_causal and swaps_heads):
        mask = attention_mask(segments, dtype, queries)
    return SplitAttention(ranks=ranks, swaps_heads=swaps_heads, mask=mask, keys=keys, lengths=lengths)


def head_repeats(heads: int, kv_heads: int, ranks: int) -> int:
    """Return how often to repeat each key and value head so that all ranks get equally many; 0 if that is impossible.

    Args:
        heads, kv_heads: the numbers of query heads, and of key and value heads, in a layer.
    """
    repeats = ranks // math.gcd(kv_heads, ranks)
    return repeats if heads % ranks == 0 and heads // kv_heads % repeats == 0 else 0


def document_lengths(positions: Tensor, first: int, last: int) -> tuple[dict[str, Any], slice]:
    """Return (document lengths that flash attention needs for the queries first..last - 1, range of their keys).

    A document begins where positions [B, S] are 0. Queries see the keys from the start of their document up to
    themselves. If the queries are only part of the tokens, B must be 1.
    """
    starts = (positions.flatten() == 0).nonzero()[:, 0]
    ends = torch.cat([starts[1:], starts.new_tensor([positions.numel()])])
    if last - first < positions.shape[1]:
        assert len(positions) == 1
        is_here = (ends > first) & (starts < last)
        starts, ends = starts[is_here], ends[is_here].clamp(max=last)
        keys = slice(int(starts[0]), last)
    else:
        first, keys = 0, WHOLE
    of_queries, of_keys = ends - starts.clamp(min=first), ends - starts
    counts = {"q": of_queries, "k": of_keys}
    lengths = {f"cu_seq_lens_{name}": F.pad(count.cumsum(0), (1, 0)).int() for name, count in counts.items()}
    return lengths | {f"max_length_{name}": int(count.max()) for name, count in counts.items()}, keys


@torch.compiler.disable
def _attention(
    kernel: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *,
    scaling: float | None = None, split_attention: SplitAttention | None = None, **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for this rank's slice: query [B, H, s, D], key and value [B, K, s, D] -> [B, s, H, D].

    Collective. transformers calls this instead of the kernel.
    """
    if split_attention is None:
        raise AsyncRLError(
            f"learner.sequence_parallel: {type(module).__name__} does not hand on the keyword arguments that the model "
            "gets, so its attention would see a slice of each row alone. Set learner.sequence_parallel: 1"
        )
    ranks = split_attention.ranks
    if split_attention.swaps_heads:
        repeats = head_repeats(query.shape[1], key.shape[1], ranks.size())
        key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
        query, key, value = (_swap_to_heads(x, ranks) for x in (query, key, value))
    else:
        key, value = (_gather_keys(x, ranks)[:, :, split_attention.keys] for x in (key, value))
    output = _attend(kernel, module, query, key, value, split_attention, scaling, options)
    if split_attention.swaps_heads:
        output = _swap_to_tokens(output, ranks)
    return output.contiguous(), None


def _attend(
    kernel: str, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, split: SplitAttention,
    scaling: float | None, options: dict[str, Any],
) -> Tensor:
    """Compute attention with the kernel: query [B, H, Q, D], key and value [B, K, S, D] -> [B, Q, H, D]."""
    mask = split.mask
    output: Tensor
    if isinstance(mask, BlockMask):
        output = flex_attention_forward(module, query, key, value, mask, scaling=scaling, **options)[0]
        return output
    if kernel == "sdpa":
        if mask is not None and (groups := query.shape[1] // key.shape[1]) > 1:  # else torch takes its slowest kernel
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output.transpose(1, 2)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output = _flash_attention_forward(
        query, key, value, None, query_length=query.shape[1], is_causal=True, softmax_scale=scaling,
        softcap=options.get("softcap"), attn_implementation=kernel, **split.lengths,
    )
    return output


def _swap_to_heads(x: Tensor, ranks: DeviceMesh) -> Tensor:
    """Exchange all heads of own tokens for all tokens of own heads. [B, heads, s, D] -> [B, heads / n, S, D]"""
    pieces = x.unflatten(1, (ranks.size(), -1)).transpose(0, 1)  # [n, B, heads / n, s, D]
    received: Tensor = _Exchange.apply(pieces, ranks)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _swap_to_tokens(x: Tensor, ranks: DeviceMesh) -> Tensor:
    """Exchange all tokens of own heads for all heads of own tokens. [B, S, heads / n, D] -> [B, s, heads, D]"""
    pieces = x.unflatten(1, (ranks.size(), -1)).transpose(0, 1)  # [n, B, s, heads / n, D]
    received: Tensor = _Exchange.apply(pieces, ranks)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _gather_keys(x: Tensor, ranks: DeviceMesh) -> Tensor:
    """Gather the keys or values of all tokens of a row. [B, K, s, D] of this rank's tokens -> [B, K, S, D]"""
    gathered: Tensor = _Gather.apply(x, ranks)  # [n, B, K, s, D]
    return gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Exchange(torch.autograd.Function):
    """Sends piece i of [n, ...] to rank i, and returns the pieces received from all ranks. It is its own transpose."""

    @staticmethod
    def forward(ctx: Any, pieces: Tensor, ranks: DeviceMesh) -> Tensor:
        ctx.ranks = ranks
        received = torch.empty_like(pieces, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, pieces.contiguous(), group=ranks.get_group())
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad, ctx.ranks), None


class _Gather(torch.autograd.Function):
    """Returns the tensors of all ranks, [n, ...]. The gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, ranks: DeviceMesh) -> Tensor:
        ctx.ranks = ranks
        gathered = own.new_empty(ranks.size(), *own.shape)
        dist.all_gather(list(gathered.unbind()), own.contiguous(), group=ranks.get_group())
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        own = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter(own, list(grad.contiguous().unbind()), group=ctx.ranks.get_group())
        return own, None
