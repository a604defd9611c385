"""The transports nccl (between GPUs) and gloo (on CPUs): both halves of a broadcast by torch.distributed.

Learner rank 0 is rank 0 of one process group. All ranks of all servers are its ranks 1, 2, ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    _new_process_group_helper,
    _world,
)

from async_rl.base.config import Config
from async_rl.base.errors import ServersSilentError
from async_rl.base.network import open_listener
from async_rl.base.weights.members import LOST_WITHIN_S, Member, Members, start_together, wait_for_all
from async_rl.base.weights.server_admin import Bucket
from async_rl.base.weights.transport import BucketTransport, bucket_num_bytes, open_store, unpack

ANSWER_WITHIN_S = 6.0
"""If a server does not answer within this time, none is asked to join a group. The push fails, and may be repeated."""

TORCH_WAITS_LONGER_S = 6 * LOST_WITHIN_S
"""How much longer torch's own limits are than the learner's, whose error names the missing server. After its limit the
learner looks for dead servers, for LOST_WITHIN_S and any running probes, and aborts the group, also at its servers:
NCCL's watchdog, which ends a process at torch's limit, must not come first. SGLang's servers, which take no limit, use
torch's default, 30 minutes."""


class BroadcastTransport(BucketTransport):
    """The learner's half: rank 0 broadcasts each bucket to all ranks of all servers, in one process group."""

    def __init__(
        self, config: Config, members: Members, rank: int, device: torch.device, *, backend: str
    ) -> None:
        super().__init__(config, members, rank, device)
        self.backend = backend
        self.group_name = ""
        self.group: dist.ProcessGroup | None = None
        self.answer_within_s = ANSWER_WITHIN_S
        self._store: Store | None = None
        """The key-value store of `group`. An entry in it tells the servers that `group` is aborted."""
        self._joined: tuple[Member, ...] = ()
        """The members with which `group` was made. The group is used only while they are exactly the current ones."""

    def connect(self) -> None:
        if self.group is not None and {*self._joined} == {*self.members.current}:
            return
        self.disconnect()
        if not self.members:
            return
        # the schedulers of the others would wait for a silent one
        if silent := wait_for_all(self.members.probes(), self.answer_within_s):
            raise ServersSilentError(f"joining the weight group: {', '.join(silent)} did not answer", silent)
        self.group_name = f"weights-{time.time_ns()}"
        members, limit = self.members.current, self.members.limit
        host, tp = self.config.network.host, self.config.placement.rollout.tp
        world_size = 1 + len(members) * tp
        # The store listens before any server is asked to join: a server that can't reach it blocks its whole scheduler.
        listener = open_listener(host, self.config.network.port_range)
        # not of `limit`: later pushes in this group may have a longer one, at most push_s
        torch_limit_s = self.config.timeouts.push_s + TORCH_WAITS_LONGER_S
        self._store = store = open_store(host, 0, 0, world_size, timedelta(seconds=torch_limit_s), listener)
        calls: dict[str, Callable[[], Any]] = {
            member.name: partial(
                self.members.admin(member.name).join_group, name=self.group_name, host=host, port=store.port,
                first_rank=1 + index * tp, world_size=world_size, backend=self.backend,
            )
            for index, member in enumerate(members)
        }
        calls["learner rank 0"] = partial(
            join_group, store, 0, world_size, self.group_name, self.backend, torch_limit_s
        )
        self.group = start_together(calls, limit, "joining the weight group")()["learner rank 0"]
        self._joined = members

    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        label = version if bucket.is_last else None
        calls = self.members.calls(lambda admin: admin.receive_bucket(bucket, label, self.group_name))
        if calls:
            data = bucket.data.to(self.device)
            filled = torch.cuda.current_stream(data.device).record_event() if data.is_cuda else None
            calls["learner rank 0"] = partial(self.broadcast, data, filled)
        return start_together(calls, self.members.limit, f"push of version {version}")

    def broadcast(self, data: Tensor, filled: torch.cuda.Event | None) -> None:
        """Broadcast `data` and wait until it is sent.

        On a GPU this uses a separate stream, which starts once `filled` is reached.

        All threads share one default stream, which gathers the next bucket meanwhile. `data` is kept until the
        broadcast has ended, and its memory is overwritten only after that.
        """
        if filled is None:
            dist.broadcast(data, group=self.group, group_src=0)
            return
        stream = torch.cuda.Stream(data.device)
        stream.wait_event(filled)
        with torch.cuda.stream(stream):
            dist.broadcast(data, group=self.group, group_src=0)
        stream.synchronize()

    def give_up(self, is_sending: bool) -> tuple[str, ...]:
        self._abort()  # frees the servers that hang in a broadcast
        if is_sending:
            return ()
        self._joined = ()
        # A server leaves also while it samples, but not while it hangs in the join.
        return self.members.tell(lambda admin: admin.leave_group(self.group_name), self.members.names)

    def _abort(self) -> None:
        if self._store is not None:
            tell_to_abort(self._store, self.group_name)
            self._store = None
        if self.group is not None:
            self.group.abort()
            dist.destroy_process_group(self.group)
            self.group = None

    def disconnect(self) -> None:
        """Destroy the group here, and make its members that are still current leave it."""
        self._abort()
        staying = [member.name for member in self._joined if member in self.members.current]
        self._joined = ()
        self.members.tell(lambda admin: admin.leave_group(self.group_name), staying)

    def close(self) -> None:
        if not self.config.rollout.server_url:
            self._joined = ()  # these servers end with the run
        self.disconnect()


open_nccl = partial(BroadcastTransport, backend="nccl")
open_gloo = partial(BroadcastTransport, backend="gloo")


class Receiver:
    """The server's half of the transport, for engines without their own (SGLang has one). Calls block: use a thread."""

    def __init__(self) -> None:
        self.groups: dict[str, dist.ProcessGroup] = {}
        self._spare: list[Tensor] = []
        """Buffers of replaced weights, used again because allocating so much memory takes longer than filling it."""
        self._received: list[Tensor] = []
        self._in_use: list[Tensor] = []

    def begin_push(self) -> None:
        """Begin a push: forget the buffers of a failed one, because a thread of that push may still write to them."""
        self._received = []

    def end_push(self) -> None:
        """End a push once its weights are in use. The old weights' memory is reused on a CPU and freed on a GPU."""
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

        Raises:
            KeyError: the group was never joined.
            RuntimeError: the connection to the sender is lost.
        """
        with own_stream(device or torch.device("cpu")):  # the model goes on sampling in the default stream
            data = self._buffer(bucket_num_bytes(dtypes, shapes), device)
            dist.broadcast(data, group=self.groups[group_name], group_src=0)
            if data.is_cuda:
                torch.cuda.current_stream(data.device).synchronize()
                data.record_stream(torch.cuda.default_stream(data.device))  # which reads it when it is loaded
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
    """Create a process group in the same way as SGLang does, once all members have joined, and return it.

    `torch.distributed.new_group` can't create it: it requires that all members are in one default group.
    """
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(backend), PrefixStore(group_name, store),
        group_name=GroupName(group_name), timeout=timedelta(seconds=timeout_s),
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


_KEY = "aborted"
FOR_EVER = timedelta(days=1000)


def tell_to_abort(store: Store, group_name: str) -> None:
    """Make every server that has called `abort_when_told` abort the group."""
    with suppress(DistError, RuntimeError):  # a store that can't be reached has been noticed by the servers too
        # A connection of its own: a thread of the learner that still waits for members to join keeps the other busy.
        own = store.clone()  # type: ignore[attr-defined]
        PrefixStore(group_name, own).set(_KEY, "")


def abort_when_told(group: ProcessGroup, group_name: str, host: str, port: int) -> None:
    """Start a thread that aborts `group` when the learner calls `tell_to_abort`, or has ended.

    Gloo notices a dead member, NCCL on one host does not: a kernel waits for the dead peer for ever. Leaving the group
    does not help, because `destroy_process_group` waits for the kernel.

    Args:
        host, port: where the learner serves the group's store.
    """
    store = TCPStore(host, port, is_master=False, wait_for_workers=False)  # of its own: others wait for its answers

    def wait_and_abort() -> None:
        with suppress(DistError, RuntimeError):
            PrefixStore(group_name, store).wait([_KEY], FOR_EVER)
        group.abort()

    threading.Thread(target=wait_and_abort, name=f"abort of {group_name}", daemon=True).start()


def own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Within this context the thread has its own CUDA stream, next to the server's computation.

    On a CPU it does nothing.
    """
    if device.type == "cpu":
        return nullcontext()
    torch.cuda.set_device(device)  # of this thread
    return torch.cuda.stream(torch.cuda.Stream(device))
