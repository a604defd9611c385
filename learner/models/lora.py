"""Adds low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) to a model through peft, and merges them.

A linear layer W x becomes W x + alpha / rank * B A x; W is frozen, A [rank, in] and B [out, rank] are trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from async_rl.base.config import LoraConfig
from async_rl.base.errors import ConfigError
from async_rl.base.weights.checkpoint_names import to_checkpoint
from async_rl.base.weights.parcels import SUFFIX, adapter_parcel, base_parcel, checksum
from learner.models.network import gathered

_ADAPTER = "default"
_FROZEN = ".base_layer"


def add_adapters(lm: Any, config: LoraConfig) -> None:
    """Freeze a model and add adapters to its linear layers, in place. B starts as zeros, so the outputs stay the same.

    Raises:
        ConfigError: no layer is linear, or target_modules names no layer, one that isn't linear, or the output head.
    """
    head = lm.get_output_embeddings()
    named = lm.named_modules()
    linear = {name.rsplit(".", 1)[-1] for name, m in named if isinstance(m, nn.Linear) and m is not head}
    if not linear:  # e.g. GPT-2, whose layers are Conv1D
        raise ConfigError(
            f"model.lora.rank must be 0 with {type(lm).__name__}, got {config.rank}: the model has no linear layers "
            "(torch.nn.Linear) that adapters could be put into"
        )
    if wrong := set(config.target_modules) - linear:
        raise ConfigError(
            f"model.lora.target_modules must be linear layers of {type(lm).__name__}, which are "
            f"{', '.join(sorted(linear))}, got {', '.join(sorted(wrong))}"
        )
    alpha: Any = config.alpha
    modules = sorted(config.target_modules or linear)
    peft_config = PeftConfig(r=config.rank, lora_alpha=alpha, lora_dropout=config.dropout, target_modules=modules)
    inject_adapter_in_model(peft_config, lm, _ADAPTER)


def _layers(lm: nn.Module) -> list[LoraLayer]:
    return [module for module in lm.modules() if isinstance(module, LoraLayer)]


def adapter_starts(lm: nn.Module) -> Iterator[tuple[nn.Module, Callable[[torch.Size], Tensor]]]:
    """Yield (linear layer, function from a shape to its first weight) for A and B of each adapter. B starts at 0.

    A is drawn as a whole, so that its values don't depend on how it is sharded.
    """
    for layer in _layers(lm):
        yield layer.lora_A[_ADAPTER], lambda shape: nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5))
        yield layer.lora_B[_ADAPTER], torch.zeros


def dropouts(lm: nn.Module) -> list[nn.Module]:
    """Return the dropout layers of the model's adapters. `Policy.forward` turns them on in passes with gradient."""
    return [d for layer in _layers(lm) for d in layer.lora_dropout.values() if isinstance(d, nn.Dropout)]


@contextmanager
def without_adapters(lm: nn.Module) -> Iterator[None]:
    """Return a context: inside, the adapters of `lm`, if it has any, have no effect."""
    layers = _layers(lm)
    scaling = [layer.scaling[_ADAPTER] for layer in layers]
    for layer in layers:
        layer.scaling[_ADAPTER] = 0.0
    try:
        yield
    finally:
        for layer, value in zip(layers, scaling, strict=True):
            layer.scaling[_ADAPTER] = value


def merged_parameters(lm: nn.Module, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in transformers, whole tensor) of each parameter, with adapters merged: W + alpha / rank * B A.

    Collective: all ranks gather one layer at a time. Tied parameters are yielded once, under their first name. A merged
    W is summed in the type of W; all others are converted to `dtype` before they are gathered.
    """
    modules = dict(lm.named_modules())
    for name, parameter in lm.named_parameters():
        if ".lora_" in name:
            continue
        layer = modules[name.rpartition(_FROZEN)[0]] if _FROZEN in name else None
        if isinstance(layer, LoraLayer) and name.endswith(".weight"):
            a, b = (gathered(matrix.get_parameter(f"{_ADAPTER}.weight")) for matrix in (layer.lora_A, layer.lora_B))
            whole = torch.addmm(gathered(parameter), b, a, alpha=layer.scaling[_ADAPTER]).to(dtype)
        else:
            whole = gathered(parameter, dtype)
        yield name.replace(_FROZEN, ""), whole


class AdapterParcels:
    """Makes the parcels of a push that sends only adapters (weight_sync.lora adapter).

    Servers merge them, so that they have the weights of `merged_parameters`, by the names of model folders.

    Raises:
        ConfigError: an adapted weight has another form in the model folder than in the model.
    """

    def __init__(self, lm: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._base_sums: dict[str, int] = {}
        """[name of a layer] checksum of the frozen weight under its adapter, which servers compare. {} before the first
        push.
        """
        shapes = {
            name.replace(_FROZEN, ""): torch.empty(parameter.shape, device="meta")
            for name, parameter in lm.named_parameters() if ".lora_" not in name
        }
        self._adapted: dict[str, tuple[str, LoraLayer]] = {}
        """[name of a layer] (name of its weight in the model folder, the layer)."""
        for name, module in lm.named_modules():
            if isinstance(module, LoraLayer):
                weight = f"{name}.weight"
                sent = list(to_checkpoint(lm, [(weight, shapes[weight])]))
                if len(sent) != 1 or sent[0][1].shape != shapes[weight].shape:
                    raise ConfigError(
                        f"weight_sync.lora must be merged with this model, got adapter: its folder has {weight}, which "
                        "has an adapter, in another form than the model"
                    )
                self._adapted[name] = (sent[0][0], module)
        adapted = {weight for weight, _ in self._adapted.values()}
        self._frozen = [name for name, _ in to_checkpoint(lm, shapes.items()) if name not in adapted]

    def parcels(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parcel) of every weight. Collective.

        All ranks gather the adapters, and in the first push also the frozen weights under them.
        """
        for name in self._frozen:
            yield name + SUFFIX, base_parcel(self._dtype)
        for name, layer in self._adapted.values():
            a, b = (gathered(matrix.get_parameter(f"{_ADAPTER}.weight")) for matrix in (layer.lora_A, layer.lora_B))
            if name not in self._base_sums:
                base = gathered(layer.get_base_layer().get_parameter("weight"))
                self._base_sums[name] = checksum(base.cpu().contiguous())
            scaling = layer.scaling[_ADAPTER]
            yield name + SUFFIX, adapter_parcel(a.cpu(), b.cpu(), scaling, self._dtype, self._base_sums[name])
