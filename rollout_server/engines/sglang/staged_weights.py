"""Weights that an SGLang server receives while it generates, and their swap into use during a pause.

SGLang itself loads them into a copy of its module tree that has its own parameters. So names, fused layers and the
shards of a tensor-parallel rank are handled as in every other update. `swap` is a custom weight loader of SGLang, its
public hook for code in the process that owns the model.

The copy is filled with NaN before each push. A parameter that still contains a NaN afterwards was not loaded and is not
swapped, so the weight in use stays, as in an update without staging.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from async_rl.base.weights.broadcast import Announcement
from async_rl.base.weights.sums import holds_nan


class StagedWeights:
    """A second set of the model's weights, into which the parts of a push are loaded."""

    def __init__(self) -> None:
        self._copy: Any = None
        """The model's tree of modules with other parameters; None: there was no push yet."""
        self._place = ""
        self._loaded: list[tuple[Tensor, Tensor]] = []
        """(parameter in use, its staged value) of all that a complete push has loaded; [] before its last part."""

    def load(self, model: nn.Module, named_tensors: list[tuple[str, Tensor]], announced: Announcement) -> None:
        """Load a part of a push into the second set. The model in use does not change."""
        if announced.is_first:
            self._loaded = []
            if self._copy is None or self._place != announced.place:
                self._copy = None  # its memory is needed for the new one
                self._copy, self._place = copy_of(model, announced.place), announced.place
            for parameter in self._copy.parameters():
                _erase(parameter)
        self._copy.load_weights(named_tensors)
        if announced.is_last:
            pairs = zip(model.parameters(), self._copy.parameters(), strict=True)
            self._loaded = [(used.data, staged.data) for used, staged in pairs if _is_loaded(staged)]

    def swap(self, model: Any) -> None:
        """Copy the staged weights over the model's own weights. Captured CUDA graphs use the addresses of the latter.

        Raises:
            ValueError: no complete push was staged since the last swap, or the model's weights have another layout.
        """
        loaded, self._loaded = self._loaded, []
        if not loaded:
            raise ValueError("no complete set of weights was staged")
        for used, staged in loaded:
            if used.shape != staged.shape or used.dtype != staged.dtype:
                raise ValueError(f"a weight has the shape {tuple(used.shape)}, its staged value {tuple(staged.shape)}")
        for used, staged in loaded:
            used.copy_(staged, non_blocking=True)
        if loaded[0][0].is_cuda:
            torch.cuda.current_stream().synchronize()  # the next push overwrites what is copied from
        if hasattr(model, "post_load_weights"):  # computes what the model derives of its weights; SGLang asks likewise
            model.post_load_weights()


_staged = StagedWeights()
"""The staged weights of this process, which has one model."""


def load(model: nn.Module, named_tensors: list[tuple[str, Tensor]], announced: Announcement) -> None:
    """Load a part of a push into the staged weights; see StagedWeights.load."""
    _staged.load(model, named_tensors, announced)


def swap(model: nn.Module, named_tensors: list[Any]) -> None:
    """Put the staged weights into use. SGLang calls this as a custom loader, while paused, with no tensors."""
    _staged.swap(model)


def copy_of(model: nn.Module, place: str) -> nn.Module:
    """Return a copy of the module tree with its own parameters.

    Parameters that are tied in the model are tied in the copy.

    A stand-in with the same `named_parameters` is not enough: SGLang's `load_weights` visits the submodules, and would
    write into the weights in use where a submodule is not copied.

    Args:
        place: where the copy's parameters are: `device` (the model's own) or `host`.
    """
    memo: dict[int, Any] = {}

    def of_module(module: nn.Module) -> nn.Module:
        if id(module) not in memo:
            memo[id(module)] = copy = object.__new__(type(module))
            copy.__dict__ = dict(module.__dict__)
            copy.__dict__["_parameters"] = {
                name: None if p is None else of_parameter(p) for name, p in module._parameters.items()
            }
            copy.__dict__["_modules"] = {
                name: None if m is None else of_module(m) for name, m in module._modules.items()
            }
        return memo[id(module)]

    def of_parameter(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in memo:
            data = torch.empty_like(
                parameter.data, device=None if place == "device" else "cpu",
                pin_memory=place == "host" and parameter.is_cuda,
            )
            memo[id(parameter)] = copy = nn.Parameter(data, requires_grad=False)
            copy.__class__ = parameter.__class__
            copy.__dict__.update(parameter.__dict__)  # its loader among them, which takes the parameter to load
        return memo[id(parameter)]

    return of_module(model)


def _erase(parameter: nn.Parameter) -> None:
    if parameter.is_floating_point():
        parameter.data.fill_(torch.nan)


def _is_loaded(parameter: nn.Parameter) -> bool:
    floats = parameter.is_floating_point() and parameter.numel() > 0
    return floats and not holds_nan(parameter.data)
