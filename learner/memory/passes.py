"""Measures the memory of a network's forward and backward pass with tensors that have shapes but no data."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel

from learner.models.sequence import head_repeats

_LAYERS = (2, 3)
_ROWS = (1, 2)


@dataclass(frozen=True, slots=True)
class PassMemory:
    """The bytes that a forward and backward pass takes for each row, without weights and their gradients."""

    kept: float
    """The bytes that the forward pass keeps for the backward pass."""
    peak: float
    """The most at a time: what is kept, and what the backward pass of a block makes."""


def measure_pass(
    config: Any, row_tokens: int, dtype: torch.dtype, *, checkpoints: bool, masked: bool, slices: int = 1
) -> PassMemory:
    """Return the memory of a row in a pass of the model that `config`, a transformers config, describes.

    With learner.sequence_parallel it is the memory of one of the `slices` ranks that split the row. Attention is SDPA,
    unless the config says eager; flex and flash attention keep as much. The passes are made with two and with three
    layers, with one row and with two, and all other sizes follow from these.

    Args:
        checkpoints: keep only the inputs of each block.
        masked: attention has a mask [rows, 1, S, S], which counts, for each rank that splits the row; else it is
            causal.

    Raises:
        NotImplementedError: the sizes of the model's tensors depend on its data, so that data would be needed; or the
            ranks that split a row gather its keys.
    """
    heads = config.num_attention_heads
    if slices > 1 and not head_repeats(heads, getattr(config, "num_key_value_heads", None) or heads, slices):
        raise NotImplementedError(
            f"learner.sequence_parallel {slices} does not divide the {heads} heads, so that its ranks gather keys"
        )
    if dtype == torch.float32 and getattr(config, "num_experts", None):  # experts compute without data in bfloat16 only
        half = measure_pass(config, row_tokens, torch.bfloat16, checkpoints=checkpoints, masked=masked, slices=slices)
        return PassMemory(2 * half.kept, 2 * half.peak)
    found = {
        (layers, rows): _pass_bytes(config, layers, rows, row_tokens, dtype, checkpoints, masked)
        for layers in _LAYERS for rows in _ROWS
    }  # fmt: skip
    mask = dtype.itemsize * row_tokens**2 * masked

    def of_row(index: int) -> float:
        """Return the bytes of one more row at the config's number of layers."""
        few, more = (found[layers, _ROWS[1]][index] - found[layers, _ROWS[0]][index] for layers in _LAYERS)
        return (few + (more - few) * (config.num_hidden_layers - _LAYERS[0])) / slices + mask

    return PassMemory(of_row(0), of_row(1))


def _pass_bytes(
    config: Any, layers: int, rows: int, row_tokens: int, dtype: torch.dtype, checkpoints: bool, masked: bool
) -> tuple[int, int]:
    """Return (bytes kept for the backward pass, most bytes at a time) without the mask and the gradients of weights."""
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
            if checkpoints:
                blocks = set(base._no_split_modules or ())  # type: ignore[arg-type]
                for block in [module for module in base.modules() if type(module).__name__ in blocks]:
                    forward = partial(checkpoint, block.forward, use_reentrant=False)
                    block.forward = forward  # type: ignore[method-assign]
            mask = torch.zeros(rows, 1, row_tokens, row_tokens, dtype=dtype) if masked else None
            where = torch.arange(rows * row_tokens)
            existing = [*base.parameters(), *base.buffers(), where, *([] if mask is None else [mask])]
            with LiveBytes(existing) as counter:
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
    """Counts the bytes of the tensors that are made within the `with` block while they live: `peak` is their most.

    Tensors without data count too. What one operation allocates for itself alone is not seen. `existing` are tensors
    from before the block. Views of them cost nothing.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count((leaf._local_tensor if isinstance(leaf, DTensor) else leaf).untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes
