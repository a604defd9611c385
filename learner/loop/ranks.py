"""The learner's ranks: their process group, the meshes that divide the work, and the driver's requests to rank 0."""

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
from async_rl.base.network import use_interface
from async_rl.base.telemetry.status import A_PERSON
from async_rl.base.weights.transport import open_store
from learner.loop.batches import NoBatch

PAUSE_BEAT_S = 5.0
"""The longest that the other ranks wait for rank 0 at a time during a pause of the run."""


class DriverRequests:
    """The driver's requests to the learner (stop, end, save, pause). Threads make them; rank 0 checks between steps."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._save = threading.Event()
        self._end_reason = ""
        self._pauses: set[str] = set()
        """What each pause waits on."""
        self._changed = threading.Event()
        """Set by each request that ends the wait of a paused learner."""

    def stop(self) -> None:
        """Ask the learner to write a checkpoint and end the run, as after Ctrl-C."""
        self._stop.set()
        self._changed.set()

    def end(self, reason: str) -> None:
        """Ask the learner to end the run as if run.steps were reached. The first non-empty `reason` is kept."""
        self._end_reason = self._end_reason or reason

    def save(self) -> None:
        """Ask the learner for a checkpoint."""
        self._save.set()

    def pause(self, waits_on: str = A_PERSON) -> None:
        """Ask the learner to take no further step until `go_on` is called with the same text.

        Args:
            waits_on: what the pause waits on, for the status.
        """
        self._pauses.add(waits_on)
        self._changed.clear()

    def go_on(self, waits_on: str = A_PERSON) -> None:
        """Ask the learner to end the pause that waits on `waits_on`. Another pause may hold it still."""
        self._pauses.discard(waits_on)
        if not self._pauses:
            self._changed.set()

    @property
    def waits_on(self) -> str:
        """What the pauses wait on; "" if there is none."""
        return ", ".join(sorted(self._pauses))

    def wait_paused(self) -> None:
        """Wait for a request that ends the pause, at most PAUSE_BEAT_S: the other ranks wait for news from rank 0."""
        self._changed.wait(PAUSE_BEAT_S)

    def saved(self) -> None:
        """Withdraw the request for a checkpoint: it is being written."""
        self._save.clear()

    def why_no_batch(self) -> NoBatch | None:
        """Return the most urgent request, as the reason not to take a step now; None if there is no request."""
        if self._stop.is_set():
            return NoBatch("stopped")
        if self._end_reason:
            return NoBatch("ended", self._end_reason)
        if self._save.is_set():
            return NoBatch("checkpoint wanted")
        return NoBatch("paused") if self._pauses else None


class SharedGpus:
    """A lock between the learner's steps and the starts of servers on the same GPUs.

    A starting server measures the free memory of its GPU. In the middle of a step it would get a small KV cache for the
    rest of the run, or none. The driver calls `begin_start` and `end_start` on rank 0, from other threads. On other
    ranks no step waits.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = False
        """Whether the learner is in a step, which ends with the push of its weights."""
        self._starting: set[str] = set()

    def begin_step(self, limit: Limit) -> None:
        """Wait until no server is starting, then begin a step. Raises WaitTimeoutError if one still is after `limit`.
        """
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
        """Wait until the learner is in no step, then keep it from the next step until `end_start` of server `name`.

        Raises:
            WaitTimeoutError: the step has not ended within `limit`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._steps, limit.seconds):
                raise WaitTimeoutError(f"{name} waited {limit} to start on the learner's GPU, for the end of its step")
            self._starting.add(name)

    def end_start(self, name: str) -> None:
        """Record that server `name` has started or failed to start."""
        with self._changed:
            self._starting.discard(name)
            self._changed.notify_all()


def start_limit(timeouts: TimeoutsConfig) -> Limit:
    """Return how long a step waits for servers: each may take timeouts.startup_s to start, and again to connect."""
    return Limit(timeouts.batch_s + 2 * timeouts.startup_s, "timeouts.batch_s + 2 * timeouts.startup_s")


def init_distributed(
    config: Config, rank: int, world_size: int, master_address: str, master_port: int,
    listener: socket.socket | None = None,
) -> torch.device:
    """Join the default group of all learner ranks (gloo for CPU tensors, NCCL for GPUs), and return this rank's device.

    The group's timeout covers the longest wait for rank 0: servers that start on its GPUs, a batch or an evaluation,
    then a push.

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
    """How the learner's ranks divide weights, batches and rows. Ranks are numbered node by node.

    With n = learner.sequence_parallel, rank r trains on share r // n of each batch, and on slice r % n of the rows in
    it.
    """

    mesh: DeviceMesh
    """The mesh of all ranks, over which FSDP2 shards. With learner.sharding hybrid its shape is [nodes that hold
    copies, ranks of a node]."""
    sequence: DeviceMesh | None = None
    """The n ranks that have slices of the same rows; None: every rank has whole rows."""
    vocabulary: DeviceMesh | None = None
    """The ranks over which FSDP2 shards this rank's n-th of head and embeddings: one rank of each sequence group."""

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
    """Return the meshes of all ranks, by learner.sharding and learner.sequence_parallel. Collective."""
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
