"""The mask of packed rows for flex attention, which computes or skips blocks of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from learner.packing.microbatches import may_look

BLOCK = 128
"""Tokens: the side of a block."""
SLAB = 8 * BLOCK
"""Tokens whose pairs exist at a time."""


def block_mask(
    segments: Tensor,  # [2, B, S] segment of each token and of its prompt
) -> BlockMask:
    """What torch's create_block_mask makes of the rule of `may_look`. That has all S * S pairs at once, as 64-bit
    integers and several times over: 2 GB each for a row of 16k tokens.
    """
    own, root = segments
    size = own.shape[1]

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & ((own[b, k] == own[b, q]) | (own[b, k] == root[b, q]))

    some, full = [], []
    for start in range(0, size, SLAB):
        slab = may_look(segments, start, min(start + SLAB, size))
        slab = F.pad(slab, (0, -size % BLOCK, 0, -slab.shape[1] % BLOCK))
        blocks = slab.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))  # [B, blocks, BLOCK, blocks, BLOCK]
        some.append(blocks.any(4).any(2))
        full.append(blocks.all(4).all(2))
    in_some, in_all = torch.cat(some, 1), torch.cat(full, 1)
    return BlockMask.from_kv_blocks(
        *_listed(in_some & ~in_all), *_listed(in_all), BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=(size, size)
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """From [B, q, k] bool: how many of each row are set [B, 1, q], and the numbers of all, those first [B, 1, q, k]."""
    numbers = blocks.int().argsort(dim=2, descending=True, stable=True)
    return blocks.sum(2, dtype=torch.int32)[:, None], numbers.int()[:, None]
