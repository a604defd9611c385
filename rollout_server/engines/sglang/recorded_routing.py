"""This project's changes to how SGLang records experts, made in the process of its scheduler.

retraction    SGLang recomputes the KV of a retracted request with newer weights, and would report the experts of
              that pass for all tokens. Instead the experts of each token's first forward pass are kept.
layers        The record needs the layer's number, which routers of Mixtral, OLMoE and others do not know.
CPU           SGLang's buffer in pinned memory needs CUDA, and a gate of Qwen2-MoE needs Triton.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from torch import Tensor

_release = schedule_batch.release_req
_collect = SchedulerBatchResultProcessor._maybe_collect_routed_experts
_init_capturer = ModelRunner.init_routed_experts_capturer


def install() -> None:
    """Make the changes. They affect only servers with --enable-return-routed-experts."""
    schedule_batch.release_req = _keep_and_release  # where retract_all looks it up
    SchedulerBatchResultProcessor._maybe_collect_routed_experts = _collect_first
    ModelRunner.init_routed_experts_capturer = _number_and_init
    if not torch.cuda.is_available():
        ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
        _compute_gates_in_torch()


def _keep_and_release(*, req: Any, req_to_token_pool: Any, **rest: Any) -> bool:
    """Save the experts of a request before its KV is released. Experts saved at an earlier release are kept."""
    if req.return_routed_experts and req.output_ids:
        length = len(req.origin_input_ids) + len(req.output_ids)
        rows = get_global_experts_capturer().get_topk(req.kv.req_pool_idx, length, req_to_token_pool)
        first = getattr(req, "first_experts", rows[:0])
        req.first_experts = torch.cat([first, rows[len(first) :]])
    released: bool = _release(req=req, req_to_token_pool=req_to_token_pool, **rest)
    return released


def _collect_first(processor: Any, req: Any) -> None:
    _collect(processor, req)
    first = getattr(req, "first_experts", None)
    if req.routed_experts is not None and first is not None:
        first = first[req.routed_experts_start_len :][: len(req.routed_experts)]
        req.routed_experts[: len(first)] = first


def _number_and_init(runner: Any) -> None:
    for name, module in runner.model.named_modules():
        if isinstance(module, TopK) and module.layer_id is None and (match := re.search(r"layers\.(\d+)\.", name)):
            module.layer_id = int(match[1])
    _init_capturer(runner)


def _plain_memory(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, pin_memory: bool, allocator: Any, *_: Any
) -> Tensor:
    return torch.empty(dims, dtype=dtype)


def _compute_gates_in_torch() -> None:
    """Replace the Triton kernel for the gate of Qwen2-MoE's shared experts by torch code, which runs on CPUs."""
    from sglang.srt.models import qwen2_moe

    def gated(hidden: Tensor, weight: Tensor, shared: Tensor) -> Tensor:
        return shared * torch.sigmoid(hidden @ weight)[..., None]

    def add_gated(hidden: Tensor, weight: Tensor, shared: Tensor, out: Tensor) -> Tensor:
        return out.add_(gated(hidden, weight, shared))

    qwen2_moe.fused_gate_sigmoid_mul = gated
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated
