"""The weight plane: from the learner's ranks into every running rollout server.

Transports share one interface and differ only in how bytes travel; `open_publisher` is the one place that maps a
transport's name to its class. A version is served whole or not at all: servers are paused, receive every bucket, get
the version's label with the last one, and only then go on. A push that fails leaves its servers paused and raises,
so no token is ever sampled from half-loaded weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.weights.base import PushReport, WeightPublisher

if TYPE_CHECKING:
    import torch

__all__ = ["PushReport", "WeightPublisher", "open_publisher"]


def open_publisher(config: Config, engine_urls: list[str], rank: int, device: torch.device) -> WeightPublisher:
    """The learner's half of the configured transport; call on every learner rank.

    `auto` is for the driver to settle, who knows the placement; here it is the one for this device alone.
    """
    from async_rl.weights.broadcast import BroadcastPublisher
    from async_rl.weights.cuda_ipc import CudaIpcPublisher
    from async_rl.weights.disk import DiskPublisher

    transport = config.weight_sync.transport
    if transport == "auto":
        transport = "gloo" if device.type == "cpu" else "cuda_ipc"
    match transport:
        case "nccl":
            return BroadcastPublisher(config, engine_urls, rank, device, backend="nccl")
        case "gloo":
            return BroadcastPublisher(config, engine_urls, rank, device, backend="gloo")
        case "cuda_ipc":
            return CudaIpcPublisher(config, engine_urls, rank, device)
        case "disk":
            return DiskPublisher(config, engine_urls, rank, device)
    raise ConfigError(f"weight_sync.transport must be auto, nccl, gloo, cuda_ipc or disk, got {transport!r}")
