"""Makes attention masks of packs: numbers that are added to scores, or blocks for flex attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128
"""Number of tokens along each side of a block."""
SLAB = 8 * BLOCK
"""Number of query tokens whose pairs are in memory at a time."""
WHOLE = slice(None)


def attention_mask(
    segments: Tensor,  # [2, B, S] segment of each token and of its prompt
    dtype: torch.dtype,
    queries: slice = WHOLE,
) -> Tensor:
    """Return what to add to attention scores: 0 where a token may attend, the lowest number elsewhere. [B, 1, s, S]

    The s query tokens are given by `queries`, by default all S.
    """
    start, end, _ = queries.indices(segments.shape[2])
    allowed = may_attend(segments, start, end)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


def may_attend(segments: Tensor, start: int, end: int) -> Tensor:
    """Return whether tokens start..end - 1 may attend to each token of their pack, a bool [B, end - start, S].

    It may attend to the tokens of its own segment and of its prompt, not to later ones.
    """
    own, root = segments[:, :, start:end, None]
    other = segments[0][:, None, :]
    place = torch.arange(segments.shape[2], device=segments.device)
    return ((other == own) | (other == root)) & (place <= place[start:end, None])


def block_mask(segments: Tensor, queries: slice = WHOLE) -> BlockMask:
    """Return the mask that torch's create_block_mask gives for the rule of `may_attend`, with less memory.

    create_block_mask holds all S * S pairs at once, as 64-bit integers and several times over: 2 GB each for a pack of
    16k tokens. `segments` and `queries` are as in `attention_mask`; the mask counts queries from 0.
    """
    own, root = segments
    size = own.shape[1]
    first, last, _ = queries.indices(size)

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        q = q + first
        return (q >= k) & ((own[b, k] == own[b, q]) | (own[b, k] == root[b, q]))

    some, full = [], []
    for start in range(first, last, SLAB):
        slab = may_attend(segments, start, min(start + SLAB, last))
        slab = F.pad(slab, (0, -size % BLOCK, 0, -slab.shape[1] % BLOCK))
        blocks = slab.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))  # [B, blocks, BLOCK, blocks, BLOCK]
        some.append(blocks.any(4).any(2))
        full.append(blocks.all(4).all(2))
    in_some, in_all = torch.cat(some, 1), torch.cat(full, 1)
    return BlockMask.from_kv_blocks(
        *_listed(in_some & ~in_all), *_listed(in_all), BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=(last - first, size)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (number of True blocks in each pack [B, 1, q], columns with True blocks first [B, 1, q, k])."""
    numbers = blocks.int().argsort(dim=2, descending=True, stable=True)
    return blocks.sum(2, dtype=torch.int32)[:, None], numbers.int()[:, None]
