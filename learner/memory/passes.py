"""Measures the memory of a network's forward and backward pass with tensors that have shapes but no data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel

from learner.models.network import blocks_of
from learner.models.sequence import head_repeats


class PassMemory(NamedTuple):
    """Bytes of a forward and backward pass for each row, without weights and their gradients."""

    kept: float  # by the forward pass for the backward pass
    peak: float  # the most at a time: what is kept, and what the backward pass of a block makes


_measured: dict[tuple[object, ...], PassMemory] = {}
"""Earlier results of `measure_pass` by its arguments. One start of a run asks several times for the same."""


def measure_pass(
    config: Any, row_tokens: int, dtype: torch.dtype, *, checkpoints: bool, masked: bool, slices: int = 1
) -> PassMemory:
    """Return the memory that a row takes in a forward and backward pass of the model of `config` (transformers').

    The passes have two and three layers, and one and two rows; larger sizes are extrapolated. Attention is eager or
    SDPA; flex and flash attention keep as much as SDPA. With `checkpoints` only the inputs of each block are kept.

    Args:
        masked: attention has a mask [rows, 1, S, S], which each rank has whole; else it is causal.
        slices: ranks that split the row (learner.sequence_parallel). The result is the memory of one of them.

    Raises:
        NotImplementedError: the model can't run without data, or the ranks that split a row gather its keys.
    """
    model = (type(config), config.to_json_string(use_diff=False), config._attn_implementation)
    key = (*model, row_tokens, dtype, checkpoints, masked, slices)
    if key in _measured:
        return _measured[key]
    heads = config.num_attention_heads
    if slices > 1 and not head_repeats(heads, getattr(config, "num_key_value_heads", None) or heads, slices):
        raise NotImplementedError(
            f"learner.sequence_parallel {slices} does not divide the {heads} heads, so that its ranks gather keys"
        )
    # experts compute without data in bfloat16 only, with half the bytes
    measured = torch.bfloat16 if getattr(config, "num_experts", None) else dtype

    def added_row(layers: int) -> np.ndarray:
        """Return (bytes kept, most bytes at a time) that a second row adds."""
        one, two = (_pass_bytes(config, layers, rows, row_tokens, measured, checkpoints, masked) for rows in (1, 2))
        return np.subtract(two, one) * (dtype.itemsize // measured.itemsize)

    few, more = added_row(2), added_row(3)
    mask = dtype.itemsize * row_tokens**2 * masked
    kept, peak = (few + (more - few) * (config.num_hidden_layers - 2)) / slices + mask
    return _measured.setdefault(key, PassMemory(float(kept), float(peak)))


def _pass_bytes(
    config: Any, layers: int, rows: int, row_tokens: int, dtype: torch.dtype, checkpoints: bool, masked: bool
) -> tuple[int, int]:
    """Return (bytes kept, most bytes at a time) of a pass, without the mask and the gradients of weights."""
    config = deepcopy(config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = (list(config.layer_types) * layers)[:layers]
    attention = "eager" if config._attn_implementation == "eager" else "sdpa"
    try:
        with FakeTensorMode():
            base: nn.Module = AutoModel.from_config(config, dtype=dtype, attn_implementation=attention).eval()
            for parameter in base.parameters():
                if parameter.requires_grad:  # some models have parameters that are never trained
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)  # as FSDP takes them over, by block
            for block in blocks_of(base) if checkpoints else ():
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
            mask = torch.zeros(rows, 1, row_tokens, row_tokens, dtype=dtype) if masked else None
            where = torch.arange(rows * row_tokens)
            with LiveBytes([*base.parameters(), *base.buffers(), where, *([] if mask is None else [mask])]) as counter:
                # not tokens: the gradient of the embeddings, which is no block's, may take more than all else
                embedded = torch.zeros(rows, row_tokens, config.hidden_size, dtype=dtype, requires_grad=True)
                states = base(inputs_embeds=embedded, attention_mask=mask, use_cache=False).last_hidden_state
                chosen = states.flatten(0, 1)[where]
                del states
                kept = counter.live
                chosen.backward(torch.empty_like(chosen))
    except (RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise NotImplementedError(f"a model of type {config.model_type} can't run without data ({reason})") from error
    return kept, counter.peak


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


class LiveBytes(TorchDispatchMode):
    """A context that counts the bytes of tensors made inside: `live` is the present number, `peak` the highest so far.

    Tensors without data count too. It does not see what one operation allocates for itself. Views of `existing` tensors
    cost nothing.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = weakref.WeakSet(tensor.untyped_storage() for tensor in existing)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = (leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage()
                if storage not in self._seen:
                    self._seen.add(storage)
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
