"""The weight plane: from the learner's ranks into every running rollout server.

Transports share one interface and differ only in how bytes travel; `open_publisher` is the one place that maps a
transport's name to its class. A version is served whole or not at all: servers are paused, receive every bucket, get
the version's label with the last one, and only then go on. A push that fails leaves its servers paused and raises,
so no token is ever sampled from half-loaded weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_rl.config import Config
from async_rl.config.check import check
from async_rl.seams import ENGINES, TRANSPORTS, choose_transport, find_entry
from async_rl.weights.base import PushReport, WeightPublisher

if TYPE_CHECKING:
    import torch

__all__ = ["PushReport", "WeightPublisher", "open_publisher"]


def open_publisher(config: Config, engine_urls: list[str], rank: int, device: torch.device) -> WeightPublisher:
    """Open the learner's half of weight_sync.transport. Every learner rank calls this.

    The driver, which knows the placement, replaces `auto`. A caller without a driver gets the transport for learner and
    server on one device.

    Raises:
        ConfigError: there is no such transport, it can't be imported, or the engine's servers can't receive from it.
    """
    engine = find_entry(ENGINES, config.rollout.engine, "rollout.engine")
    name: str = config.weight_sync.transport
    if name == "auto":
        name = choose_transport(engine, device.type, one_device=True, own_gpus=False)
    transport = find_entry(TRANSPORTS, name, "weight_sync.transport")
    check(
        transport.delivers in engine.receives, "weight_sync.transport", name,
        f"one that delivers {', '.join(engine.receives)} with rollout.engine {config.rollout.engine}",
    )
    publisher: WeightPublisher = transport.load()(config, engine_urls, rank, device)
    return publisher
