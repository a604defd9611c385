"""This project's changes to SGLang, made in the process of its scheduler, which owns the model.

weight checker     SGLang's loaders skip tensors with unknown names, and the request still succeeds. So the first push
                   of a run fills all weights with NaN; a weight that still has a NaN was not loaded.
groups             A scheduler that hangs in a broadcast with a dead peer can't be asked to leave the group, so a
                   thread does it. Another thread receives what a push with weight_sync.double_buffer announces.
compact pushes     Full weights are rebuilt from parcels (weight_sync.lora adapter, weight_sync.delta) before SGLang
                   loads them.
pause in place     The running forward pass is read before the pause returns, see `_read_and_pause`.
CPU                One attention call computes many short sequences, and a paused scheduler sleeps.
routing            With --enable-return-routed-experts, the experts of each token are from its first forward pass, also
                   after a retraction. Then SGLang recomputes the KV with newer weights, and would report the experts of
                   that pass for all tokens. The record needs the layer's number, which routers of Mixtral, OLMoE and
                   others do not know. On CPUs its buffer is not pinned, and torch computes the gate of Qwen2-MoE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from sglang.srt.utils.weight_checker import WeightChecker
from torch import Tensor, nn

from async_rl.base.models_and_data.model_folder import weight_files
from async_rl.base.weights.parcels import Rebuilder, checksum, is_parcel
from async_rl.base.weights.sums import holds_nan, value_sums
from async_rl.base.weights.transport import abort_when_told
from rollout_server.engines.http_admin import ERASE, SUMS, UNLOADED, VALUE_SUMS
from rollout_server.engines.sglang import staged_weights
from rollout_server.engines.sglang.admin import BASE_VARIABLE
from rollout_server.engines.sglang.decode_attention import decode_attention

_handle: Callable[..., Any] = WeightChecker.handle
_join: Callable[..., tuple[bool, str]] = WeightUpdater.init_weights_update_group
_load: Callable[..., tuple[bool, str]] = WeightUpdater.load_weights_from_distributed
_load_folder: Callable[..., tuple[bool, str]] = WeightUpdater.update_weights_from_disk
_pause = Scheduler.pause_generation
_process = Scheduler.process_batch_result
_record_paused = Scheduler._record_scheduler_state_for_paused_engine
_release = schedule_batch.release_req
_collect = SchedulerBatchResultProcessor._maybe_collect_routed_experts
_init_capturer = ModelRunner.init_routed_experts_capturer
_rebuilders: dict[int, Rebuilder] = {}
"""The one Rebuilder of this process, by the id of its model."""


def install() -> None:
    """Make the changes. Call this in the process of SGLang's scheduler before the scheduler starts."""
    WeightChecker.handle = _erase_or_handle
    WeightUpdater.init_weights_update_group = _join_and_listen
    WeightUpdater.load_weights_from_distributed = _load_rebuilt
    WeightUpdater.update_weights_from_disk = _load_folder_rebuilt
    Scheduler.pause_generation = _read_and_pause
    Scheduler.process_batch_result = _process_once
    Scheduler._record_scheduler_state_for_paused_engine = _wait_while_paused
    ATTENTION_BACKENDS["torch_native"] = BatchedDecodeBackend
    schedule_batch.release_req = _keep_and_release  # where retract_all looks it up
    SchedulerBatchResultProcessor._maybe_collect_routed_experts = _collect_first
    ModelRunner.init_routed_experts_capturer = _number_and_init
    if not torch.cuda.is_available():
        ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory
        _compute_gates_in_torch()


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
        staged_weights.receive_announced(
            group, group_name, master_address, master_port, rank_offset + updater.tp_rank, rank_offset,
            partial(staged_weights.load, updater.get_model()), torch.device(updater.device, updater.gpu_id),
        )
    return has_joined, message


def _erase_or_handle(checker: WeightChecker, action: str, *args: Any, role: str, **options: Any) -> Any:
    model: nn.Module = checker._get_model()
    if action == ERASE:
        erase(model)
        return None
    if find := _FOUND.get(action):  # in the form of SGLang's checksums, which are gathered from all ranks
        place = checker._parallelism_info(role=role).model_dump()
        return {"checksums": find(model), "per_gpu_checksum": "", "parallelism_info": place}
    return _handle(checker, action, *args, role=role, **options)


@torch.no_grad()
def erase(model: nn.Module) -> None:
    """Fill all parameters of floating-point types with NaN."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.fill_(torch.nan)


@torch.no_grad()
def unloaded(model: nn.Module) -> list[str]:
    """Return the names of the parameters that contain a NaN."""
    return [
        name for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and parameter.numel() and holds_nan(parameter)
    ]


@torch.no_grad()
def sums_of_weights(model: nn.Module) -> dict[str, str]:
    """Return a checksum of each parameter's bits: {name: checksum}. SGLang's own checksums need a GPU."""
    return {name: str(checksum(parameter.detach().cpu().contiguous())) for name, parameter in model.named_parameters()}


def _value_sums(model: nn.Module) -> dict[str, str]:
    values, sizes = value_sums(model.parameters())
    return {"values": repr(values), "sizes": repr(sizes)}


_FOUND: dict[str, Callable[[nn.Module], dict[str, str]]] = {
    UNLOADED: lambda model: dict.fromkeys(unloaded(model), "nan"), SUMS: sums_of_weights, VALUE_SUMS: _value_sums,
}
"""For each action of the weight checker: the function that computes its result from the model."""


def _load_rebuilt(updater: WeightUpdater, named_tensors: list[tuple[str, Tensor]]) -> tuple[bool, str]:
    if not any(is_parcel(name) for name, _ in named_tensors):
        return _load(updater, named_tensors)
    try:
        weights = list(_rebuilder(updater).rebuild(named_tensors))
    except ValueError as error:
        return False, str(error)
    return _load(updater, weights)


def _load_folder_rebuilt(updater: WeightUpdater, model_path: str, *args: Any, **options: Any) -> tuple[bool, str]:
    files = weight_files(Path(model_path))
    with safe_open(files[0], framework="pt") as file:
        is_compact = any(map(is_parcel, file.keys()))
    if not is_compact:
        return _load_folder(updater, model_path, *args, **options)
    return _load_rebuilt(updater, [item for file in files for item in load_file(file).items()])


def _rebuilder(updater: WeightUpdater) -> Rebuilder:
    """Return the Rebuilder of the server's model. Its base is the folder that the server started with, because SGLang's
    own model path names the last folder that it loaded.
    """
    folder = Path(os.environ[BASE_VARIABLE])
    return _rebuilders.setdefault(id(updater.get_model()), Rebuilder(lambda: weight_files(folder)))


def _read_and_pause(scheduler: Any, request: Any) -> None:
    """Pause as SGLang does, but first read the result of the running forward pass, once the device has computed it.

    With the overlap schedule the scheduler starts a forward before it has read the tokens of the previous one. SGLang's
    pause in place leaves the last forward in its queue until generation continues. Its tokens, which the old weights
    sampled, would then get the new version, and on a GPU new weights could be written while it still computes. SGLang's
    other pauses read it first.

    A result that was read stays in the queue, so that the scheduler continues as without overlap; `_process_once` does
    not read it again.
    """
    if request.mode == "in_place" and scheduler.enable_overlap and scheduler.result_queue:
        batch, result = scheduler.result_queue[0]  # there is never more than one between two turns of the loop
        scheduler.process_batch_result(batch, result)
        scheduler.result_read_at_pause = result
    _pause(scheduler, request)


def _process_once(scheduler: Any, batch: Any, result: Any) -> None:
    if getattr(scheduler, "result_read_at_pause", None) is not result:
        _process(scheduler, batch, result)


class BatchedDecodeBackend(TorchNativeAttnBackend):
    """SGLang's torch_native attention backend, but one call computes all sequences that have one new token.

    With hundreds of short sequences in a batch, one call of torch for each sequence and layer would take most of the
    server's time. Every other case is left to SGLang's code.
    """

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Tensor | None = None, **options: Any,
    ) -> Tensor:
        if encoder_lens is not None or options.get("sliding_window_size") is not None:
            return super()._run_sdpa_forward_decode(
                query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                **options,
            )
        slots = req_to_token[req_pool_indices, : int(seq_lens.max())]
        output.copy_(decode_attention(query, k_cache, v_cache, slots, seq_lens, options["scaling"]))
        return output

    def _run_sdpa_forward_extend(
        self, query: Tensor, output: Tensor, k_cache: Tensor, v_cache: Tensor, req_to_token: Tensor,
        req_pool_indices: Tensor, seq_lens: Tensor, extend_prefix_lens: Tensor, extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None, **options: Any,
    ) -> Tensor:
        """Compute the attention of a prefill. All sequences with one uncached token are computed in one call."""
        plain = encoder_lens is None and options["causal"] and options.get("sliding_window_size") is None
        single = extend_seq_lens == (1 if plain else -1)  # [B]
        tokens = torch.repeat_interleave(single, extend_seq_lens)  # [tokens]: the only new one of its sequence?
        if single.any():
            self._run_sdpa_forward_decode(
                query[tokens], part := torch.empty_like(output[tokens]), k_cache, v_cache, req_to_token,
                req_pool_indices[single], seq_lens[single], scaling=options["scaling"],
            )
            output[tokens] = part
        if not single.all():
            rest = ~single
            part = super()._run_sdpa_forward_extend(
                query[~tokens], torch.empty_like(output[~tokens]), k_cache, v_cache, req_to_token,
                req_pool_indices[rest], seq_lens[rest], extend_prefix_lens[rest], extend_seq_lens[rest],
                encoder_lens, **options,
            )
            output[~tokens] = part
        return output


def _wait_while_paused(scheduler: Scheduler) -> None:
    """Make a paused scheduler sleep until the next message, if the server has the flag `sleep-on-idle`.

    Without this change SGLang's scheduler polls while paused, and uses a core that the learner needs for the push.
    """
    _record_paused(scheduler)
    scheduler.maybe_sleep_on_idle()


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
