"""The part of a weight push that runs in vLLM's workers: a backend of vLLM's own weight-transfer endpoints.

vLLM imports this module in each worker before it creates the model and the transfer engine. So the whole server uses
the classes that this module registers and replaces.

No part of an update is loaded before the update ends. An update that breaks off, lacks a tensor or has one of a wrong
shape changes nothing. This needs memory for a second copy of the weights during a push. With weight_sync.double_buffer
a thread receives the update, so the model continues to sample until the weights are loaded.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from receiving import (
    Rebuilder,
    abort_when_told,
    check_tensors,
    checkpoint_shapes,
    holds_nan,
    is_parcel,
    map_memory,
    value_sums,
    weight_files,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.distributed_c10d import Backend, GroupName, PrefixStore, _new_process_group_helper, _world
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample import sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

BACKEND = "async_rl"
"""The name of this backend in the flag --weight-transfer-config."""


@dataclass
class GroupInfo(WeightTransferInitInfo):
    """The torch.distributed group to join: the learner is rank 0, worker i of this server is first_rank + i."""

    host: str
    port: int
    first_rank: int
    world_size: int
    name: str
    backend: str
    timeout_s: float
    torch_limit_s: float
    """NCCL ends this process after this time. The learner aborts a hanging group earlier."""


@dataclass
class PartInfo(WeightTransferUpdateInfo):
    """One part of an update: a broadcast bucket of tensors, a bucket in shared `memory`, or a model `folder`."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    """Torch names without the prefix, e.g. `float32`."""
    shapes: list[list[int]] = field(default_factory=list)
    folder: str = ""
    memory: dict[str, list[Any]] = field(default_factory=dict)
    """The result of the learner's share_bucket."""
    staging: str = "none"
    """device, host: a thread receives the broadcast while the model samples, and keeps it there. none: the worker
    waits for the broadcast."""


class WeightReceiver(WeightTransferEngine[GroupInfo, PartInfo]):
    """Receives the parts of an update in a vLLM worker, and loads them into the model when the update ends."""

    init_info_cls = GroupInfo
    update_info_cls = PartInfo
    defers_processing = True  # read by callers that load the weights themselves: they call `drain_pending` first
    _group: dist.ProcessGroup | None = None
    _thread: ThreadPoolExecutor | None = None
    """Receives staged parts in the order of their broadcasts. Each group has a new thread, because a thread may hang in
    a group whose learner has died."""
    _rebuilder: Any = None
    """Rebuilds full weights from the parcels of compact pushes; None until the first such push."""

    def init_transfer_engine(self, info: GroupInfo) -> None:
        self.shutdown()
        self._thread, self._timeout_s = ThreadPoolExecutor(1, "weight receiver"), info.timeout_s
        timeout = timedelta(seconds=info.timeout_s)
        rank = info.first_rank + self.parallel_config.rank
        store = dist.TCPStore(info.host, info.port, info.world_size, is_master=False, timeout=timeout)
        # torch.distributed.new_group requires that all members are in one default group, which these are not
        self._group, _ = _new_process_group_helper(
            info.world_size, rank, [], Backend(info.backend), PrefixStore(info.name, store),
            group_name=GroupName(info.name), timeout=timedelta(seconds=info.torch_limit_s),
        )
        _world.pg_group_ranks[self._group] = {i: i for i in range(info.world_size)}
        abort_when_told(self._group, info.name, info.host, info.port)

    def start_weight_update(self) -> None:
        self.drop_update()

    def drop_update(self) -> None:
        """Discard all parts received so far, without loading them."""
        self._tensors: dict[str, Tensor] = {}
        self._staged: list[Future[dict[str, Tensor]]] = []
        """The parts that are received during generation."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one part of an update, and wait only for its own CUDA stream.

        vLLM's own method waits for the whole device, which would include the running model.
        """
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, info: PartInfo) -> None:
        """Receive one part, or start to receive it in the thread.

        It is checked only at the end of the update, because a refusal here could make the sender hang.
        """
        if info.staging != "none" and self._thread is not None:
            self._staged.append(self._thread.submit(self._receive_beside, info))
        else:
            self._tensors |= self._read_folder(info) if info.folder else self._receive_bucket(info)

    def _receive_beside(self, info: PartInfo) -> dict[str, Tensor]:
        if self.device.type == "cpu":
            return self._receive_bucket(info)
        torch.cuda.set_device(self.device)  # of this thread
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            tensors = self._receive_bucket(info)
        return {name: t.cpu() for name, t in tensors.items()} if info.staging == "host" else tensors

    def _receive_bucket(self, info: PartInfo) -> dict[str, Tensor]:
        types = [getattr(torch, name) for name in info.dtypes]
        sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in zip(types, info.shapes, strict=True)]
        data = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device)
        if info.memory:  # it is copied, because the learner fills its buffer again after this call
            data.copy_(map_memory(info.memory, self.device)[: data.numel()])
        else:
            dist.broadcast(data, group=self._group, group_src=0)
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()
        parts = zip(info.names, types, info.shapes, data.split(sizes), strict=True)
        return {name: part.view(dtype).view(torch.Size(shape)) for name, dtype, shape, part in parts}

    def _read_folder(self, info: PartInfo) -> dict[str, Tensor]:
        files = weight_files(Path(info.folder))
        return {name: tensor for file in files for name, tensor in load_file(file, device=str(self.device)).items()}

    def drain_pending(self) -> None:
        """Wait until the thread has received all staged parts. The learner has sent all of them."""
        for part in self._staged:
            self._tensors |= part.result(self._timeout_s)
        self._staged = []

    def finish_weight_update(self) -> None:
        """Load all received tensors into the model.

        Raises:
            ValueError: a tensor is missing, unknown or has a wrong shape. Then nothing is loaded.
        """
        self.drain_pending()
        if any(is_parcel(name) for name in self._tensors):
            self._tensors = self._rebuilt(self._tensors)
        check_tensors(self._tensors, checkpoint_shapes(Path(self.model_config.model)), self._is_tied)
        # vLLM's linear layers may compute from a packed copy of their weights, which load_weights alone does not renew
        initialize_layerwise_reload(self.model)
        self.model.load_weights(self._tensors.items())
        finalize_layerwise_reload(self.model, self.model_config)
        if self._is_tied and self.device.type == "cpu":
            head = self.model.lm_head  # reloading renews the packed copy of the embeddings, but not of a tied head
            head.quant_method.process_weights_after_loading(head)
        self.drop_update()

    def _rebuilt(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the full weights rebuilt from parcels. Raises ValueError if one is damaged or made for other weights.
        """
        if self._rebuilder is None:
            self._rebuilder = Rebuilder(lambda: weight_files(Path(self.model_config.model)))
        return {name: weight.to(self.device) for name, weight in self._rebuilder.rebuild(tensors.items())}

    @property
    def _is_tied(self) -> bool:
        return bool(self.model_config.hf_text_config.tie_word_embeddings)

    def shutdown(self) -> None:
        """Leave the torch.distributed group with the learner, if this worker has joined one."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None


class WorkerExtension:
    """Methods that vLLM adds to its worker class, so that POST /collective_rpc can call them."""

    def drop_weight_update(self) -> None:
        """Discard an unfinished update, if there is one. Otherwise vLLM would refuse to start the next one."""
        self._weight_update_active = False
        self.weight_transfer_engine.drop_update()  # type: ignore[attr-defined]

    @torch.no_grad()
    def erase_weights(self) -> None:
        """Fill all weights with NaN. Called before a push that is verified."""
        for parameter in self.get_model().parameters():  # type: ignore[attr-defined]
            if parameter.is_floating_point():
                parameter.fill_(torch.nan)

    @torch.no_grad()
    def unloaded_weights(self) -> list[str]:
        """Return the names of the weights that contain a NaN."""
        return [
            name for name, parameter in self.get_model().named_parameters()  # type: ignore[attr-defined]
            if parameter.is_floating_point() and parameter.numel() and holds_nan(parameter)
        ]

    def value_sums(self) -> list[float]:
        """Return [sum of all weights' values, sum of their absolute values], a list because vLLM sends a tuple as text.
        """
        return [*value_sums(self.get_model().parameters())]  # type: ignore[attr-defined]


class FullLogprobs(TopKTopPSampler):
    """Makes vLLM report each token's logprob as log_softmax(logits / temperature), also if top_p excludes tokens."""

    def __call__(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        full = None if p is None else logits.log_softmax(-1, dtype=torch.float32)  # sampling overwrites the logits
        sampled, logprobs = super().__call__(logits, generators, k, p)
        return sampled, logprobs if full is None else full


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)
sampler.TopKTopPSampler = FullLogprobs
