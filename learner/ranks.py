"""Opens the process group of all learner ranks, and the mesh that FSDP2 shards over."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from async_rl.config import Config
from async_rl.network import open_store, use_interface


def init_distributed(
    config: Config, rank: int, world_size: int, master_address: str, master_port: int,
    listener: socket.socket | None = None,
) -> torch.device:
    """Join the default group of all learner ranks (gloo for CPU tensors, NCCL for GPUs), and return the device.

    The group's timeout covers the longest that ranks wait for rank 0: a batch or an evaluation, then a push.

    Args:
        listener: rank 0's socket that listens at the address and port; None: it is opened here.
    """
    timeouts = config.timeouts
    use_interface(config.network.host)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeouts.startup_s + timeouts.work_s + timeouts.push_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=open_store(master_address, master_port, rank, world_size, timeout, listener),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    return device


def open_mesh(config: Config, device: torch.device) -> DeviceMesh:
    """Return the mesh that FSDP2 shards over.

    It holds all ranks; with learner.sharding hybrid it has the shape [nodes that hold copies, ranks of a node].
    """
    ranks = dist.get_world_size()
    if config.learner.sharding == "full":
        return init_device_mesh(device.type, (ranks,))
    nodes = config.placement.learner.nodes  # ranks are numbered node by node
    return init_device_mesh(device.type, (nodes, ranks // nodes), mesh_dim_names=("copies", "shards"))
