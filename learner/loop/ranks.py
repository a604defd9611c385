"""The learner's ranks: their process group, the meshes that divide the work, and requests of the driver to rank 0."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from async_rl.base.config import Config, Limit, TimeoutsConfig
from async_rl.base.errors import WaitTimeoutError
from async_rl.base.network import open_store, use_interface
from learner.loop.batches import NoBatch

PAUSE_BEAT_S = 5.0
"""The other ranks wait for rank 0 at most so long at a time, however long a pause lasts."""


class DriverRequests:
    """Keeps what the driver asks for from another thread, until rank 0 heeds it when the step under way has ended."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._save = threading.Event()
        self._end_reason = ""
        self._is_paused = False
        self._changed = threading.Event()
        """Set by each request that ends the wait of a paused learner."""

    def stop(self) -> None:
        """Ask for the end of the run with a checkpoint, as after Ctrl-C."""
        self._stop.set()
        self._changed.set()

    def end(self, reason: str) -> None:
        """Ask for the end of the run as if run.steps were reached, for a `reason` that is not empty; the first counts.
        """
        self._end_reason = self._end_reason or reason

    def save(self) -> None:
        """Ask for a checkpoint."""
        self._save.set()

    def pause(self) -> None:
        """Ask for no further step until `go_on`."""
        self._is_paused = True
        self._changed.clear()

    def go_on(self) -> None:
        """Ask for the end of the pause."""
        self._is_paused = False
        self._changed.set()

    def wait_paused(self) -> None:
        """Wait until something else is asked for, PAUSE_BEAT_S at most: then the other ranks are told again."""
        self._changed.wait(PAUSE_BEAT_S)

    def saved(self) -> None:
        """Note that the checkpoint is being written."""
        self._save.clear()

    def why_no_batch(self) -> NoBatch | None:
        """Return what the learner has to do instead of a step, the most urgent first; None: nothing was asked for."""
        if self._stop.is_set():
            return NoBatch("stopped")
        if self._end_reason:
            return NoBatch("ended", self._end_reason)
        if self._save.is_set():
            return NoBatch("checkpoint wanted")
        return NoBatch("paused") if self._is_paused else None


class SharedGpus:
    """Lets either the learner take a step or lost servers start again. A server measures the free memory of its GPU.

    One that starts in the middle of a step would have a small KV cache for the rest of the run, or none. The driver
    calls `begin_start` and `end_start` of rank 0 from other threads; on other ranks no step waits.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = False
        """Whether the learner is in a step, which ends when its weights are pushed."""
        self._starting: set[str] = set()

    def begin_step(self, limit: Limit) -> None:
        """Wait until no server is starting, and begin a step. WaitTimeoutError: one still does so after `limit`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._starting, limit.seconds):
                names = ", ".join(sorted(self._starting))
                raise WaitTimeoutError(f"the learner waited {limit} for the start of {names}, on a GPU that they share")
            self._steps = True

    def end_step(self) -> None:
        with self._changed:
            self._steps = False
            self._changed.notify_all()

    def begin_start(self, name: str, limit: Limit) -> None:
        """Wait until the learner is in no step, and keep it from the next one until `end_start`.

        Raises:
            WaitTimeoutError: the step has not ended within `limit`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._steps, limit.seconds):
                raise WaitTimeoutError(f"{name} waited {limit} to start on the learner's GPU, for the end of its step")
            self._starting.add(name)

    def end_start(self, name: str) -> None:
        """Note that the start of server `name` has ended, well or not."""
        with self._changed:
            self._starting.discard(name)
            self._changed.notify_all()


def start_limit(timeouts: TimeoutsConfig) -> Limit:
    """Return how long a step waits for servers: each may take timeouts.startup_s to start, and to reach the others."""
    return Limit(timeouts.batch_s + 2 * timeouts.startup_s, "timeouts.batch_s + 2 * timeouts.startup_s")


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
