"""The tables of rollout engines and weight transports, with what each can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from async_rl.seams.lookup import implementation

Code = str | Callable[..., Any]
"""A class or function, or where it is as `module:name`."""
UPDATE_POLICIES = ("in_place", "retract", "drain", "abort")
"""What weight_sync.on_update may be."""


@dataclass(frozen=True, kw_only=True)
class EngineEntry:
    """What a rollout engine can do. Its code is described in rollout_server/engines/base.py."""

    open: Code
    """(config, index of the server, folder for its logs) -> Engine, not yet started."""
    open_admin: Code
    """(config, base URL of a server) -> ServerAdmin: how a learner pauses, updates and resumes it."""
    update_policies: tuple[str, ...]
    """The values of weight_sync.on_update that leave true token versions behind."""
    transports: tuple[str, ...]
    """The transports whose bytes its servers can receive."""
    releases_memory: bool = False
    """Weights and KV cache can be given back for the learner's turn on a shared GPU."""
    updates_in_background: bool = False
    """New weights may arrive beside the old while it generates (weight_sync.background)."""
    max_tensor_parallel: int = 1
    """GPUs of one server at most; 0: any number."""
    attaches_to_url: bool = False
    """A server that runs already can be used (rollout.server_url)."""
    computes_in_worker: bool = False
    """It computes in the worker's own process, not in one that it starts."""

    def load(self) -> Callable[..., Any]:
        """What opens the engine. ConfigError: it can't be imported."""
        return implementation(self.open, "rollout.engine")

    def load_admin(self) -> Callable[..., Any]:
        """What opens a `ServerAdmin`. ConfigError: it can't be imported."""
        return implementation(self.open_admin, "rollout.engine")


@dataclass(frozen=True, kw_only=True)
class TransportEntry:
    """Where a transport works. Its code is a `WeightPublisher`, see async_rl/weights/base.py."""

    publisher: Code
    devices: tuple[str, ...]
    """Device types that the learner's weights may be on."""
    needs_one_device: bool = False
    """Learner and server share one GPU (or one host without), on loopback."""
    needs_own_gpus: bool = False
    """Learner ranks and servers have GPUs of their own."""

    def load(self) -> Callable[..., Any]:
        """The publisher's class. ConfigError: it can't be imported."""
        return implementation(self.publisher, "weight_sync.transport")


ENGINES: dict[str, EngineEntry] = {
    "sglang": EngineEntry(
        open="rollout_server.engines.sglang.engine:open_engine",
        open_admin="rollout_server.engines.sglang.admin:SGLangAdmin",
        update_policies=UPDATE_POLICIES,
        transports=("nccl", "gloo", "cuda_ipc", "disk"),
        releases_memory=True,
        max_tensor_parallel=0,
        attaches_to_url=True,
    ),
    "hf": EngineEntry(
        open="rollout_server.engines.hf.engine:open_engine",
        open_admin="rollout_server.engines.sglang.admin:SGLangAdmin",
        update_policies=UPDATE_POLICIES,
        transports=("nccl", "gloo", "disk"),
        updates_in_background=True,
        computes_in_worker=True,
    ),
}

TRANSPORTS: dict[str, TransportEntry] = {
    "nccl": TransportEntry(
        publisher="async_rl.weights.broadcast:BroadcastPublisher", devices=("cuda",), needs_own_gpus=True
    ),
    "gloo": TransportEntry(publisher="async_rl.weights.broadcast:BroadcastPublisher", devices=("cpu",)),
    "cuda_ipc": TransportEntry(
        publisher="async_rl.weights.cuda_ipc:CudaIpcPublisher", devices=("cpu", "cuda"), needs_one_device=True
    ),
    "disk": TransportEntry(publisher="async_rl.weights.disk:DiskPublisher", devices=("cpu", "cuda")),
}
