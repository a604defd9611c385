"""The base class of weight transports, the transports nccl and gloo, and buckets: tensors packed into flat bytes.

A transport only sends bytes. The publisher (publisher.py) pauses and resumes the servers, and recovers from deaths.

The transports nccl (between GPUs) and gloo (on CPUs) broadcast by torch.distributed, in one process group: learner rank
0 is its rank 0, all ranks of all servers are its ranks 1, 2, ... Both halves are here.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, PrefixStore, ProcessGroup, Store, TCPStore
from torch.distributed.distributed_c10d import Backend, GroupName, _new_process_group_helper, _world

from async_rl.base.config import Config
from async_rl.base.errors import ServersSilentError
from async_rl.base.network import open_listener
from async_rl.base.weights.servers import LOST_WITHIN_S, Bucket, Member, Members, start_together, wait_for_all

ANSWER_WITHIN_S = 6.0
"""If a server does not answer within this time, none is asked to join a group. The push fails, and may be repeated."""

TORCH_WAITS_LONGER_S = 6 * LOST_WITHIN_S
"""How much longer torch's own limits are than the learner's, whose error names the missing server. After its limit the
learner looks for dead servers, for LOST_WITHIN_S and any running probes, and aborts the group, also at its servers:
NCCL's watchdog, which ends a process at torch's limit, must not come first. SGLang's servers, which take no limit, use
torch's default, 30 minutes."""
FOR_EVER = timedelta(days=1000)
_ABORTED = "aborted"
"""The key in a group's store that tells its servers to abort the group."""


class Transport(ABC):
    """The learner's side of a transport. Normally only rank 0 calls servers.

    Each learner rank has two objects: one for pushes to all servers, and one that brings servers that join their first
    weights. They have different `members`, and never send at the same time.

    In each push the publisher calls `connect`, `stage`, `send` and `end_push` on rank 0, and `help` on other ranks.
    """

    def __init__(self, config: Config, members: Members, rank: int, device: torch.device) -> None:
        self.config = config
        self.settings = config.weight_sync.settings
        """The settings object of this transport, filled from weight_sync.params; None if it takes no settings."""
        self.members = members
        self.rank = rank
        self.device = device
        self.bucket_bytes = config.weight_sync.bucket_bytes
        self.dtype = torch.uint8 if config.weight_sync.is_compact else serving_dtype(config, device.type)
        """The type of tensors on the way: the servers' type, or bytes in a compact push."""

    def connect(self) -> None:  # noqa: B027 - a transport may need none
        """On rank 0: connect to all current members. It does nothing if exactly these are connected.

        Raises:
            WeightSyncError: a server does not answer, or refuses.
            WaitTimeoutError: not all have joined within `members.limit`.
        """

    def stage(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> Any:
        """On rank 0: prepare a push while the servers still generate.

        The result is passed to `send`; here it is the tensors.

        A transport may gather the first tensors here, or write all of them to files.
        """
        return named_tensors

    @abstractmethod
    def send(self, staged: Any, version: int) -> int:
        """On rank 0: send the weights to every server. Returns the number of bytes.

        The servers are paused meanwhile; with weight_sync.double_buffer they are paused only afterwards.
        """

    def help(  # noqa: B027 - in most transports only rank 0 sends
        self, named_tensors: Iterator[tuple[str, Tensor]], version: int
    ) -> None:
        """On other ranks: take part in a push. The publisher gathers the tensors that this call does not."""

    def end_push(self, served: int | None) -> None:  # noqa: B027 - in most transports only rank 0 sends
        """On rank 0: end a push, even a failed one, and release other ranks that wait in `help`.

        Args:
            served: the version that all members serve now; None: the push failed.
        """

    def give_up(self, is_sending: bool) -> tuple[str, ...]:
        """Free the servers that hang in a failed push. Returns those that do not answer within `members.limit`.

        Args:
            is_sending: servers may be in an update. Then the publisher ends it next, and finds servers that hang
                itself.
        """
        return ()

    def disconnect(self) -> None:  # noqa: B027 - most transports keep no connection
        """On rank 0: disconnect from the members of the last push, which still answer."""

    def close(self) -> None:  # noqa: B027 - most transports hold nothing
        """Release the transport's resources here and at the servers, such as process groups or folders."""


def serving_dtype(config: Config, device_type: str) -> torch.dtype:
    """Return the dtype of the servers' weights: model.dtype, where auto means bfloat16 on GPUs and float32 on a CPU."""
    name = config.model.dtype
    if name == "auto":
        name = "float32" if device_type == "cpu" else "bfloat16"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


class BucketTransport(Transport):
    """A transport that sends weights bucket by bucket. A subclass defines how one bucket is sent."""

    def __init__(self, config: Config, members: Members, rank: int, device: torch.device) -> None:
        super().__init__(config, members, rank, device)
        self._buffers: list[Tensor | None] = [None, None]

    @abstractmethod
    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        """Start to send `bucket`.

        Returns immediately; the result is a function that waits until every server has received it.
        """

    def stage(self, named_tensors: Iterator[tuple[str, Tensor]], version: int) -> Iterator[Bucket]:
        """Gather the first bucket. Returns an iterator over all buckets, which gathers the others when they are needed.
        """
        buckets = iter_buckets(named_tensors, self.bucket_bytes, self.dtype, self._buffers)
        return itertools.chain(list(itertools.islice(buckets, 1)), buckets)

    def send(self, staged: Iterator[Bucket], version: int) -> int:
        """Send all weights in buckets. The next bucket is gathered while one is sent. Returns the number of bytes."""
        num_bytes = 0
        wait_sent: Callable[[], Any] | None = None
        for bucket in staged:
            if wait_sent:
                wait_sent()
            wait_sent = self.start_sending(bucket, version)
            num_bytes += bucket.data.numel()
        if wait_sent:
            wait_sent()
        if self.device.type == "cuda":  # training needs the memory; on a CPU allocating it again would be slow
            self._buffers = [None, None]
        return num_bytes


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


def iter_buckets(
    named_tensors: Iterable[tuple[str, Tensor]],
    bucket_bytes: int,
    dtype: torch.dtype,
    buffers: list[Tensor | None],  # two of [bytes] uint8; None: not allocated yet
) -> Iterator[Bucket]:
    """Cast the tensors to `dtype` and yield them in buckets, in order.

    A tensor over `bucket_bytes` gets its own bucket.

    Two buffers are used in turn: one bucket may be sent while the next one is filled. A bucket must have been sent when
    the second one after it is requested.
    """
    held: list[tuple[str, list[int]]] = []  # name and shape of each tensor in the bucket that is being filled
    size = turn = 0

    def packed(is_last: bool) -> Bucket:
        buffer = buffers[turn]
        assert buffer is not None
        return Bucket(
            names=[name for name, _ in held], dtypes=[str(dtype).removeprefix("torch.")] * len(held),
            shapes=[shape for _, shape in held], data=buffer[:size], is_last=is_last,
        )

    for name, tensor in named_tensors:
        num_bytes = tensor.numel() * dtype.itemsize
        if held and size + num_bytes > bucket_bytes:
            yield packed(is_last=False)
            held, size, turn = [], 0, 1 - turn
        buffer = buffers[turn]
        if buffer is None or buffer.numel() < num_bytes:
            buffers[turn] = buffer = None  # so that its memory can be used for the new one
            buffer = torch.empty(max(bucket_bytes, num_bytes), dtype=torch.uint8, device=tensor.device)
            buffers[turn] = buffer
        buffer[size : size + num_bytes].view(dtype).copy_(tensor.detach().reshape(-1))
        held.append((name, list(tensor.shape)))
        size += num_bytes
    if held:
        yield packed(is_last=True)


def unpack(
    data: Tensor,  # [bytes] uint8
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
) -> list[tuple[str, Tensor]]:
    """Return (name, tensor) for each tensor of a bucket, as views of its bytes.

    Raises:
        ValueError: the sizes don't add up.
    """
    named: list[tuple[str, Tensor]] = []
    offset = 0
    for name, dtype_name, shape in zip(names, dtypes, shapes, strict=True):
        dtype = getattr(torch, dtype_name)
        size = dtype.itemsize * torch.Size(shape).numel()
        named.append((name, data[offset : offset + size].view(dtype).view(torch.Size(shape))))
        offset += size
    if offset != data.numel():
        raise ValueError(f"the bucket must hold the {offset} bytes of its tensors, got {data.numel()} bytes")
    return named


def bucket_num_bytes(dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> int:
    """Return the total number of bytes of tensors with these types and shapes."""
    return sum(getattr(torch, d).itemsize * torch.Size(s).numel() for d, s in zip(dtypes, shapes, strict=True))


def open_store(
    address: str, port: int, rank: int, world_size: int, timeout: timedelta,
    listener: socket.socket | None = None,
) -> TCPStore:
    """Return the store through which the ranks of a torch.distributed group find each other.

    Rank 0 serves the store only at `address` (torch's default is every interface). Other ranks connect to it.

    Args:
        port: 0 on rank 0: a free one.
        timeout: how long other ranks try to connect.
        listener: a socket of rank 0 that listens there already.
    """
    if rank:
        return TCPStore(address, port, world_size, is_master=False, timeout=timeout)
    listener = listener or socket.create_server((address, port))
    return TCPStore(
        address, listener.getsockname()[1], world_size, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


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


def tell_to_abort(store: Store, group_name: str) -> None:
    """Make every server that has called `abort_when_told` abort the group."""
    with suppress(DistError, RuntimeError):  # a store that can't be reached has been noticed by the servers too
        # A connection of its own: a thread of the learner that still waits for members to join keeps the other busy.
        own = store.clone()  # type: ignore[attr-defined]
        PrefixStore(group_name, own).set(_ABORTED, "")


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
            PrefixStore(group_name, store).wait([_ABORTED], FOR_EVER)
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
