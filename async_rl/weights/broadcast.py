"""Both halves of the transport that broadcasts weights by torch.distributed, with NCCL between GPUs or gloo on CPU.

One process group holds learner rank 0 as its rank 0 and all ranks of all servers (1, 2, ...).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    Store,
    _new_process_group_helper,
    _world,
)

from async_rl.config import Config
from async_rl.errors import ServersSilentError
from async_rl.network import open_store
from async_rl.network.ports import open_listener
from async_rl.weights.base import LOST_WITHIN_S
from async_rl.weights.bucket import Bucket, bucket_num_bytes, unpack
from async_rl.weights.bucket_publisher import BucketPublisher
from async_rl.weights.group_abort import abort_when_told, tell_to_abort
from async_rl.weights.silent_servers import wait_for_all
from async_rl.weights.start_together import start_together

ANSWER_WITHIN_S = 6.0
"""If a server does not answer for so long, none is asked to join a group: the push fails, and may be repeated."""

TORCH_WAITS_LONGER_S = 6 * LOST_WITHIN_S
"""By so much torch's own limits are longer than the learner's, whose error names who was waited for. After its limit
the learner looks for dead servers, for LOST_WITHIN_S and the probes that are under way then, and aborts the group, also
its servers' part: NCCL's watchdog, which ends a process at torch's limit, must not come first. The part of a server of
SGLang, which takes no limit, has torch's own, 30 minutes."""


class BroadcastPublisher(BucketPublisher):
    """The learner's half of the transport: rank 0 broadcasts each bucket to all ranks of all servers."""

    def __init__(
        self, config: Config, engine_urls: Sequence[str], rank: int, device: torch.device, *, backend: str
    ) -> None:
        super().__init__(config, engine_urls, rank, device)
        self.backend = backend
        self.group_name = ""
        self.group: dist.ProcessGroup | None = None
        self._store: Store | None = None
        """The store of the group, by which its servers hear that it is aborted."""
        self._joined: dict[str, tuple[str, int]] = {}
        """The `members` with which `group` was made."""

    def connect(self) -> None:
        if self.rank != 0 or (self.group is not None and self._joined == self.members()):
            return
        self._leave()
        if not self.servers:
            return
        if silent := wait_for_all(self.probes(), ANSWER_WITHIN_S):  # the schedulers of the others would wait for them
            raise ServersSilentError(f"joining the weight group: {', '.join(silent)} did not answer", silent)
        self.group_name = f"weights-{time.time_ns()}"
        host, tp = self.config.network.host, self.config.placement.rollout.tp
        world_size = 1 + len(self.servers) * tp
        limit = self.push_limit
        # The store listens before any server is asked to join: a server that can't reach it blocks its whole scheduler.
        listener = open_listener(host, self.config.network.port_range)
        torch_limit_s = limit.seconds + TORCH_WAITS_LONGER_S
        self._store = store = open_store(host, 0, 0, world_size, timedelta(seconds=torch_limit_s), listener)
        calls: dict[str, Callable[[], Any]] = {
            name: partial(
                self.admin(name).join_group, name=self.group_name, host=host, port=store.port,
                first_rank=1 + index * tp, world_size=world_size, backend=self.backend,
            )
            for index, name in enumerate(self.servers)
        }
        calls["learner rank 0"] = partial(
            join_group, store, 0, world_size, self.group_name, self.backend, torch_limit_s
        )
        self.group = start_together(calls, limit, "joining the weight group")()["learner rank 0"]
        self._joined = self.members()

    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        label = version if bucket.is_last else None
        calls = self.calls(lambda admin: admin.receive_bucket(bucket, label, self.group_name))
        if calls:
            data = bucket.data.to(self.device)
            filled = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
            calls["learner rank 0"] = partial(self._broadcast, data, filled)
        return start_together(calls, self.push_limit, f"push of version {version}")

    def _broadcast(self, data: Tensor, filled: torch.cuda.Event | None) -> None:
        """Broadcast `data`, on a GPU in a stream of its own once `filled` is reached, and wait until it is sent.

        All threads share one default stream, in which the next bucket is gathered meanwhile. `data` is held until the
        broadcast has ended, and its memory is written to only after that.
        """
        if filled is None:
            dist.broadcast(data, group=self.group, group_src=0)
            return
        stream = torch.cuda.Stream(data.device)
        stream.wait_event(filled)
        with torch.cuda.stream(stream):
            dist.broadcast(data, group=self.group, group_src=0)
        stream.synchronize()

    def give_up(self) -> tuple[str, ...]:
        self._abort()  # frees the servers that hang in a broadcast
        if self.is_updating:
            return super().give_up()
        self._joined = {}
        # A server leaves also while it samples, but not while it hangs in the join.
        return self.tell_servers(lambda admin: admin.leave_group(self.group_name), self.servers)

    def _abort(self) -> None:
        if self._store is not None:
            tell_to_abort(self._store, self.group_name)
            self._store = None
        if self.group is not None:
            self.group.abort()
            dist.destroy_process_group(self.group)
            self.group = None

    def _leave(self) -> None:
        """Destroy the weight group here, and have those of its servers that the run still has leave it."""
        self._abort()
        members = self.members()
        staying = [name for name, member in self._joined.items() if members.get(name) == member]
        self._joined = {}
        self.tell_servers(lambda admin: admin.leave_group(self.group_name), staying)

    def close(self) -> None:
        if not self.config.rollout.server_url:
            self._joined = {}  # these servers end with the run
        self._leave()


open_nccl = partial(BroadcastPublisher, backend="nccl")
open_gloo = partial(BroadcastPublisher, backend="gloo")


class Receiver:
    """The server's half of the transport, for engines without one (SGLang has its own). Calls block: use a thread."""

    def __init__(self) -> None:
        self.groups: dict[str, dist.ProcessGroup] = {}
        self._spare: list[Tensor] = []
        """Buffers of replaced weights, used again because allocating so much memory takes longer than filling it."""
        self._received: list[Tensor] = []
        self._in_use: list[Tensor] = []

    def begin_push(self) -> None:
        """Begin a push: forget the buffers of one that failed, as a thread of that push may still write to them."""
        self._received = []

    def end_push(self) -> None:
        """End a push once its weights are in use. The memory of the old ones is reused on a CPU and freed on a GPU."""
        self._spare = [data for data in self._in_use if not data.is_cuda]  # the memory of a GPU is freed instead
        self._in_use, self._received = self._received, []

    def join(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str,
        backend: str, timeout_s: float,
    ) -> None:
        store = open_store(master_address, master_port, rank_offset, world_size, timedelta(seconds=timeout_s))
        torch_limit_s = timeout_s + TORCH_WAITS_LONGER_S
        group = join_group(store, rank_offset, world_size, group_name, backend, torch_limit_s)
        self.groups[group_name] = group
        abort_when_told(group, group_name, master_address, master_port)

    def receive(
        self, group_name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]],
        device: torch.device | None = None,
    ) -> list[tuple[str, Tensor]]:
        """Wait for one bucket and return (name, tensor) for each of its tensors.

        KeyError: the group was never joined. RuntimeError: the sender is lost.
        """
        data = self._buffer(bucket_num_bytes(dtypes, shapes), device)
        dist.broadcast(data, group=self.groups[group_name], group_src=0)
        return unpack(data, names, dtypes, shapes)

    def _buffer(self, num_bytes: int, device: torch.device | None) -> Tensor:  # [num_bytes] uint8
        fitting = [spare for spare in self._spare if spare.numel() == num_bytes]
        data = fitting[0] if fitting else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._spare = [spare for spare in self._spare if spare is not data]
        self._received.append(data)
        return data

    def leave(self, group_name: str) -> None:
        dist.destroy_process_group(self.groups.pop(group_name))


def join_group(
    store: Store, rank: int, world_size: int, group_name: str, backend: str, timeout_s: float
) -> dist.ProcessGroup:
    """Wait for all members and return a new process group beside the default one, made as SGLang makes its half.

    `torch.distributed.new_group` can't make one: it requires that all members are in one default group.
    """
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(backend), PrefixStore(group_name, store),
        group_name=GroupName(group_name), timeout=timedelta(seconds=timeout_s),
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
