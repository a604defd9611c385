"""Adds two actions to SGLang's weight checker, by which a verified push shows that the server loads every weight.

SGLang's loaders skip tensors whose names they don't know, and the request for the update still succeeds. So the weights
are filled with NaN before the push, and what still holds a NaN after it was not loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.utils.weight_checker import WeightChecker
from torch import nn

from rollout_server.engines.sglang.admin import ERASE, UNLOADED

_handle: Callable[..., Any] = WeightChecker.handle


def install() -> None:
    """Add the actions. Call this in the process of SGLang's scheduler before the scheduler starts."""
    WeightChecker.handle = _erase_or_handle


def _erase_or_handle(checker: WeightChecker, action: str, *args: Any, role: str, **options: Any) -> Any:
    model: nn.Module = checker._get_model()
    if action == ERASE:
        erase(model)
        return None
    if action == UNLOADED:  # in the form of SGLang's checksums, which are gathered from all ranks
        place = checker._parallelism_info(role=role).model_dump()
        return {"checksums": dict.fromkeys(unloaded(model), "nan"), "per_gpu_checksum": "", "parallelism_info": place}
    return _handle(checker, action, *args, role=role, **options)


@torch.no_grad()
def erase(model: nn.Module) -> None:
    """Fill all parameters of floating-point types with NaN."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.fill_(torch.nan)


@torch.no_grad()
def unloaded(model: nn.Module) -> list[str]:
    """Return the names of the parameters that hold a NaN."""
    return [
        name for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.numel() and bool(parameter.amax().isnan())
    ]
