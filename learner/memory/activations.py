"""Measures the memory of a network's forward and backward pass with tensors that have shapes but no data."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel

from learner.memory.live_bytes import LiveBytes
from learner.models.sequence import head_repeats

_LAYERS = (2, 3)
_ROWS = (1, 2)


@dataclass(frozen=True, slots=True)
class PassMemory:
    """The bytes that a forward and backward pass takes for each row, beside weights and their gradients."""

    kept: float
    """The bytes that the forward pass keeps for the backward pass."""
    peak: float
    """The most at a time: what is kept, and what the backward pass of a block makes."""


def measure_pass(
    config: Any, row_tokens: int, dtype: torch.dtype, *, checkpoints: bool, masked: bool, slices: int = 1
) -> PassMemory:
    """Return the memory of a row in a pass of the model that `config`, a transformers config, describes.

    With learner.sequence_parallel it is that of one of the `slices` ranks that split the row.

    Attention is SDPA, unless the config says eager; flex and flash attention keep as much. The passes are made with two
    and with three layers, with one row and with two, and all other sizes follow from these.

    Args:
        row_tokens: the number of tokens in a row.
        checkpoints: keep only the inputs of each block.
        masked: attention has a mask [rows, 1, S, S], which counts, for each rank that splits the row; else it is
            causal.

    Raises:
        NotImplementedError: the sizes of the model's tensors depend on its data, so that data would be needed; or the
            ranks that split a row gather its keys.
    """
    if slices > 1:
        heads = config.num_attention_heads
        if not head_repeats(heads, getattr(config, "num_key_value_heads", None) or heads, slices):
            raise NotImplementedError(
                f"learner.sequence_parallel {slices} does not divide the {heads} heads, so that its ranks gather keys"
            )
    if dtype == torch.float32 and getattr(config, "num_experts", None):  # experts compute without data in bfloat16 only
        half = measure_pass(
            config, row_tokens, torch.bfloat16, checkpoints=checkpoints, masked=masked, slices=slices
        )
        return PassMemory(2 * half.kept, 2 * half.peak)
    found = {
        (layers, rows): _pass_bytes(config, layers, rows, row_tokens, dtype, checkpoints, masked)
        for layers in _LAYERS for rows in _ROWS
    }  # fmt: skip

    def extrapolated(index: int) -> float:
        """Return the bytes of one more row at the config's number of layers."""
        few, more = (found[layers, _ROWS[1]][index] - found[layers, _ROWS[0]][index] for layers in _LAYERS)
        return few + (more - few) * (config.num_hidden_layers - _LAYERS[0])

    mask = dtype.itemsize * row_tokens**2 * masked
    return PassMemory(extrapolated(0) / slices + mask, extrapolated(1) / slices + mask)


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


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
