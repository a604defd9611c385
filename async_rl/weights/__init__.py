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
from async_rl.weights.publisher import PushReport, WeightPublisher

if TYPE_CHECKING:
    import torch

__all__ = ["PushReport", "WeightPublisher", "open_publisher"]


def open_publisher(config: Config, engine_urls: list[str], rank: int, device: torch.device) -> WeightPublisher:
    """The learner's half of the configured transport; call on every learner rank.

    `auto`: gloo on CPU; on GPUs nccl when each learner rank and server has devices of its own, else disk (NCCL
    refuses two ranks on one device).
    """
    from async_rl.weights.disk import DiskPublisher
    from async_rl.weights.nccl_gloo import BroadcastPublisher

    match resolve_transport(config, device.type):
        case "nccl":
            return BroadcastPublisher(config, engine_urls, rank, device, backend="nccl")
        case "gloo":
            return BroadcastPublisher(config, engine_urls, rank, device, backend="gloo")
        case "disk":
            return DiskPublisher(config, engine_urls, rank, device)
        case other:
            raise ConfigError(f"weight_sync.transport must be auto, nccl, gloo or disk, got {other!r}")


def resolve_transport(config: Config, device_type: str) -> str:
    """The transport that `auto` stands for on this machine."""
    if config.weight_sync.transport != "auto":
        return config.weight_sync.transport
    if device_type == "cpu":
        return "gloo"
    import torch

    wanted = config.placement.learner.ranks + config.placement.rollout.servers * config.placement.rollout.tp
    return "nccl" if torch.cuda.device_count() >= wanted else "disk"
