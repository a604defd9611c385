"""The weight plane: it moves weights from the learner's ranks into every running rollout server.

Transports share one interface and differ only in how bytes travel. Servers are paused and resumed through the
`ServerAdmin` of their engine. A version is served whole or not at all: servers are paused, receive every bucket, get
the version's number with the last one, and only then continue. A push that fails leaves its servers paused and raises
an error, so no token is ever sampled from half-loaded weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from async_rl.config import Config
from async_rl.seams import TRANSPORTS, working_transports
from async_rl.weights.publisher import PushReport, WeightPublisher

if TYPE_CHECKING:
    import torch

__all__ = ["PushReport", "WeightPublisher", "open_publisher"]


def open_publisher(
    config: Config, engine_urls: list[str], rank: int, device: torch.device, pool: str = "rollout"
) -> WeightPublisher:
    """Return the publisher of weight_sync.transport, by which every learner rank pushes weights to servers.

    The driver, which knows the placement, has replaced `auto`. Without a driver, `auto` gives the transport for learner
    and server on one device.

    Args:
        engine_urls: URLs of the servers `pool`/0, `pool`/1, ...
    """
    transport = config.weight_sync.transport_entry or TRANSPORTS[
        working_transports(config.engine_entries.values(), device.type, one_device=True, own_gpus=False)[0]
    ]
    publisher: WeightPublisher = transport.load()(config, engine_urls, rank, device)
    publisher.servers = {f"{pool}/{number}": url for number, url in enumerate(engine_urls)}
    return publisher
