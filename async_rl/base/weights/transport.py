"""The base classes of weight transports, and buckets: tensors packed into flat bytes.

A transport only sends bytes. The publisher (publisher.py) pauses and resumes the servers, and recovers from deaths.
"""

from __future__ import annotations

import itertools
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore

from async_rl.base.config import Config
from async_rl.base.weights.members import Members
from async_rl.base.weights.server_admin import Bucket


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
