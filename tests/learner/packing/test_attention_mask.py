from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

from learner.packing import PADDING, SLAB, attention_mask, block_mask


def packed_row(size: int, rng: np.random.Generator) -> Tensor:
    """Prompts with one to three rows each, then padding; [2, size]."""
    own: list[int] = []
    root: list[int] = []
    segment = 0
    while len(own) < size:
        lengths = rng.integers(1, 400, size=rng.integers(2, 5)).tolist()
        if len(own) + sum(lengths) > size:
            own += [PADDING] * (size - len(own))
            root += [PADDING] * (size - len(root))
            break
        for number, length in enumerate(lengths):
            own += [segment + number] * length
            root += [segment] * length
        segment += len(lengths)
    return torch.tensor([own, root])


@pytest.mark.parametrize("size", [1, 127, 128, 1000, SLAB, SLAB + 1, 2 * SLAB + 300])
def test_the_block_mask_is_what_torch_makes_of_all_pairs(size: int) -> None:
    rng = np.random.default_rng(size)
    segments = torch.stack([packed_row(size, rng) for _ in range(2)], dim=1)
    mask = block_mask(segments)
    expected = create_block_mask(mask.mask_mod, 2, None, size, size, device="cpu")
    for found, wanted in zip(mask.as_tuple(), expected.as_tuple(), strict=True):
        if isinstance(wanted, Tensor):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted)
        elif not callable(wanted):
            assert found == wanted


@pytest.mark.parametrize("queries", [slice(0, 300), slice(300, 600), slice(SLAB, SLAB + 700)])
def test_the_masks_of_some_queries_are_rows_of_the_whole_mask(queries: slice) -> None:
    segments = packed_row(SLAB + 700, np.random.default_rng(0))[:, None]
    size, count = SLAB + 700, queries.stop - queries.start
    whole = attention_mask(segments, torch.float32)
    assert torch.equal(attention_mask(segments, torch.float32, queries), whole[:, :, queries])
    mask = block_mask(segments, queries)
    expected = create_block_mask(mask.mask_mod, 1, None, count, size, device="cpu")
    assert mask.seq_lengths == (count, size) and torch.equal(mask.to_dense(), expected.to_dense())
    looked = mask.mask_mod(torch.tensor(0), torch.tensor(0), torch.arange(count)[:, None], torch.arange(size)[None])
    assert torch.equal(looked, whole[0, 0, queries] == 0)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that was made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.elements = max(self.elements, made.numel())
        return made


def test_all_pairs_of_a_long_row_never_exist_at_once() -> None:
    size = 6 * SLAB
    with Largest() as largest:
        block_mask(packed_row(size, np.random.default_rng(0))[:, None])
    assert largest.elements == SLAB * size
