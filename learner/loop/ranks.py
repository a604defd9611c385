"""Opens the process group of all learner ranks, and the meshes over which they divide weights, batches and rows."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from async_rl.base.config import Config
from async_rl.base.network import open_store, use_interface
from learner.loop.driver_requests import start_limit


def init_distributed(
    config: Config, rank: int, world_size: int, master_address: str, master_port: int,
    listener: socket.socket | None = None,
) -> torch.device:
    """Join the default group of all learner ranks (gloo for CPU tensors, NCCL for GPUs), and return the device.

    The group's timeout covers the longest that ranks wait for rank 0: servers that start on its GPUs, a batch or an
    evaluation, then a push.

    Args:
        listener: rank 0's socket that listens at the address and port; None: it is opened here.
    """
    timeouts = config.timeouts
    use_interface(config.network.host)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=start_limit(timeouts).seconds + timeouts.push_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=open_store(master_address, master_port, rank, world_size, timeout, listener),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return device


@dataclass(frozen=True, slots=True)
class Ranks:
    """The meshes over which the learner's ranks divide weights, batches and rows. Ranks are numbered node by node.

    With n = learner.sequence_parallel, rank r trains on share r // n of each batch, and holds slice r % n of its rows.
    """

    mesh: DeviceMesh
    """The mesh that FSDP2 shards over. It holds all ranks; with learner.sharding hybrid it has the shape [nodes that
    hold copies, ranks of a node]."""
    sequence: DeviceMesh | None = None
    """The n ranks that hold slices of the same rows; None: every rank holds whole rows."""
    vocabulary: DeviceMesh | None = None
    """The ranks over which FSDP2 shards this rank's n-th of head and embeddings: one of each sequence group."""

    @property
    def share(self) -> int:
        """The number of the share of each batch that this rank trains on, 0..shares - 1."""
        return dist.get_rank() // self._slices

    @property
    def shares(self) -> int:
        """The number of shares into which each batch is divided."""
        return dist.get_world_size() // self._slices

    @property
    def _slices(self) -> int:
        return 1 if self.sequence is None else self.sequence.size()


def open_ranks(config: Config, device: torch.device) -> Ranks:
    """Return the meshes of all ranks. Collective."""
    count, slices = dist.get_world_size(), config.learner.sequence_parallel
    is_hybrid = config.learner.sharding == "hybrid"
    copies = config.placement.learner.nodes if is_hybrid else 1
    if is_hybrid:
        mesh = init_device_mesh(device.type, (copies, count // copies), mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh(device.type, (count,))
    if slices == 1:
        return Ranks(mesh)
    shape = (copies, count // copies // slices, slices)
    grid = init_device_mesh(device.type, shape, mesh_dim_names=("copies", "data", "sequence"))
    return Ranks(mesh, grid["sequence"], grid["copies", "data"] if is_hybrid else grid["data"])
