"""Changes to SGLang's weight updates: they show which weights were not loaded and what was, free a server that hangs,
and take weights while the server generates.

SGLang's loaders skip tensors whose names they don't know, and the request for the update still succeeds. So the first
push of a run begins with NaN in all weights, and what still holds a NaN after it was not loaded. And a server whose
scheduler hangs in a broadcast with a dead peer can't be asked to leave the group, so a thread does it. Another thread
receives what a push with weight_sync.double_buffer announces, while the scheduler goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.utils.weight_checker import WeightChecker
from torch import nn

from async_rl.base.weights.broadcast import abort_when_told, receive_announced
from async_rl.base.weights.parcels import checksum, holds_nan
from rollout_server.engines.sglang import staged_weights
from rollout_server.engines.sglang.admin import ERASE, SUMS, UNLOADED

_handle: Callable[..., Any] = WeightChecker.handle
_join: Callable[..., tuple[bool, str]] = WeightUpdater.init_weights_update_group


def install() -> None:
    """Make the changes. Call this in the process of SGLang's scheduler before the scheduler starts."""
    WeightChecker.handle = _erase_or_handle
    WeightUpdater.init_weights_update_group = _join_and_listen


def _join_and_listen(
    updater: WeightUpdater, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str,
    backend: str = "nccl",
) -> tuple[bool, str]:
    has_joined, message = _join(
        updater, master_address, master_port, rank_offset, world_size, group_name, backend
    )
    if has_joined:
        group = updater._model_update_group[group_name]
        abort_when_told(group, group_name, master_address, master_port)
        receive_announced(
            group, group_name, master_address, master_port, rank_offset + updater.tp_rank, rank_offset,
            partial(staged_weights.load, updater.get_model()), torch.device(updater.device, updater.gpu_id),
        )
    return has_joined, message


def _erase_or_handle(checker: WeightChecker, action: str, *args: Any, role: str, **options: Any) -> Any:
    model: nn.Module = checker._get_model()
    if action == ERASE:
        erase(model)
        return None
    if action in (UNLOADED, SUMS):  # in the form of SGLang's checksums, which are gathered from all ranks
        place = checker._parallelism_info(role=role).model_dump()
        found = dict.fromkeys(unloaded(model), "nan") if action == UNLOADED else weight_sums(model)
        return {"checksums": found, "per_gpu_checksum": "", "parallelism_info": place}
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
        if parameter.is_floating_point() and parameter.numel() and holds_nan(parameter)
    ]


@torch.no_grad()
def weight_sums(model: nn.Module) -> dict[str, str]:
    """Return {name: checksum of the bits} of each parameter. SGLang's own checksums need a GPU."""
    return {name: str(checksum(parameter.detach().cpu().contiguous())) for name, parameter in model.named_parameters()}
