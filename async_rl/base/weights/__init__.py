"""Weight pushes: moves weights from the learner's ranks into every running rollout server.

    publisher.py         a push: its states, the recovery from dead servers, the verification
    members.py           the servers that get it, and calls to all of them
    server_admin.py      the operations of one server (the seam of an engine)
    transport.py         how the bytes are sent (the seam of a transport); buckets; nccl and gloo, both halves
    cuda_ipc.py          transport cuda_ipc; memory of GPUs that learner and servers share
    disk.py              transport disk
    parcels.py           compact pushes: changes (delta) and adapters
    sums.py              sums of weights, for verified pushes
    checkpoint_names.py  names and shapes of weights in model folders

A version is served completely or not at all: servers are paused, receive every bucket, get the version's number with
the last bucket, and only then continue. A push that fails is repeated or raises an error; paused servers stay paused
until a push succeeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from async_rl.base.config import Config
from async_rl.base.seams import TRANSPORTS, working_transports
from async_rl.base.weights.members import Members
from async_rl.base.weights.publisher import PushReport, PushState, WeightPublisher
from async_rl.base.weights.transport import Transport

if TYPE_CHECKING:
    import torch

__all__ = ["PushReport", "PushState", "Transport", "WeightPublisher", "open_filler", "open_publisher"]


def open_publisher(
    config: Config, engine_urls: Sequence[str], rank: int, device: torch.device
) -> WeightPublisher:
    """Return the publisher for weight_sync.transport, with which each learner rank pushes weights to servers.

    The driver, which knows the placement, has replaced `auto`. Without a driver, `auto` means the transport for learner
    and server on one device.

    Args:
        engine_urls: URLs of rollout/0, rollout/1, ...; empty: servers join later.
    """
    members = Members(config, {f"rollout/{number}": url for number, url in enumerate(engine_urls)})
    return WeightPublisher(_open_transport(config, members, rank, device))


def open_filler(publisher: WeightPublisher) -> WeightPublisher:
    """Return a publisher that brings servers their first weights, before `publisher` pushes to them.

    It has a transport of its own. So a server that can't be reached delays no other server.
    """
    config, rank, device = publisher.config, publisher.rank, publisher.transport.device
    transport = _open_transport(config, Members(config, purpose="fill"), rank, device)
    filler = WeightPublisher(transport, later=publisher)
    filler.outlives_servers = True
    return filler


def _open_transport(config: Config, members: Members, rank: int, device: torch.device) -> Transport:
    entry = config.weight_sync.transport_entry or TRANSPORTS[
        working_transports(config.engine_entries.values(), device.type, one_device=True, own_gpus=False)[0]
    ]
    transport: Transport = entry.load()(config, members, rank, device)
    return transport
