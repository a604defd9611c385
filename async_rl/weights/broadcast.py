"""Weights by torch.distributed broadcast, NCCL between GPUs and gloo on CPU. Both halves of the transport.

One process group holds learner rank 0 (its rank 0) and every rank of every server (1, 2, ...). A bucket is announced
over HTTP and travels as one flat byte tensor (SGLang's `flattened_bucket`).
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from async_rl.errors import WaitTimeoutError, WeightSyncError
from async_rl.weights.base import post, run_together, start_together
from async_rl.weights.bucketed import BucketPublisher
from async_rl.weights.buckets import Bucket, bucket_num_bytes, unpack


class BroadcastPublisher(BucketPublisher):
    """Learner half."""

    def __init__(
        self, config: Config, engine_urls: Sequence[str], rank: int, device: torch.device, *, backend: str
    ) -> None:
        super().__init__(config, engine_urls, rank, device)
        self.backend = backend
        self.group_name = ""
        self.group: dist.ProcessGroup | None = None
        self._members: dict[str, str] = {}
        """Of `group`: servers as they were when it was made."""

    def connect(self) -> None:
        if self.rank != 0 or self._members == self.servers:
            return
        self._leave()
        if not self.servers:
            return
        host = self.host
        self.group_name = f"weights-{time.time_ns()}"
        world_size = 1 + len(self.servers) * self.tp
        limit = self.timeouts.limit("join_s")
        timeout = datetime.timedelta(seconds=limit.seconds)
        # The store listens before any server is asked to join: a server that finds nobody blocks its whole scheduler.
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        calls = {"learner rank 0": partial(self._join, store, world_size)}
        for index, (name, url) in enumerate(self.servers.items()):
            body = {
                "master_address": host, "master_port": port, "rank_offset": 1 + index * self.tp,
                "world_size": world_size, "group_name": self.group_name, "backend": self.backend,
            }
            calls[name] = partial(post, self.session, url, "/init_weights_update_group", body, limit)
        run_together(calls, limit, "joining the weight group")
        self._members = dict(self.servers)

    def _join(self, store: Store, world_size: int) -> None:
        timeout_s = self.timeouts.push_s
        self.group = join_group(store, 0, world_size, self.group_name, self.backend, timeout_s)

    def start_sending(self, bucket: Bucket, version: int) -> Callable[[], Any]:
        body = {
            "names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes,
            "group_name": self.group_name, "load_format": "flattened_bucket", "flush_cache": False,
        }
        if bucket.is_last:
            body["weight_version"] = str(version)
        calls = self.calls("/update_weights_from_distributed", body)
        if calls:
            calls["learner rank 0"] = partial(self._broadcast, bucket.data.to(self.device))
        return start_together(calls, self.push_limit, f"push of version {version}")

    def _broadcast(self, data: Tensor) -> None:
        dist.broadcast(data, group=self.group, group_src=0)
        if data.is_cuda:
            torch.cuda.synchronize(data.device)

    def give_up(self) -> None:
        self._leave()

    def _leave(self) -> None:
        """Break the group up. Our half goes first: a server stuck in a broadcast is freed by the connection's end."""
        if self.group is not None:
            self.group.abort()
            dist.destroy_process_group(self.group)
            self.group = None
        left = {name: url for name, url in self._members.items() if self.servers.get(name) == url}
        self._members = {}
        with ThreadPoolExecutor(max(1, len(left))) as threads:
            list(threads.map(self._release, left.values()))

    def _release(self, url: str) -> None:
        """A server may be in no update and in no group (any more), or dead: the next push will tell."""
        group = {"group_name": self.group_name}
        for path, body in (("/end_weight_update", {}), ("/destroy_weights_update_group", group)):
            with suppress(WeightSyncError, WaitTimeoutError):
                post(self.session, url, path, body, self.timeouts.limit("join_s"))

    def close(self) -> None:
        if self.group is not None:
            dist.destroy_process_group(self.group)
            self.group = None
        super().close()


open_nccl = partial(BroadcastPublisher, backend="nccl")
open_gloo = partial(BroadcastPublisher, backend="gloo")


class Receiver:
    """Server half, for the hf engine (SGLang has its own). Blocking; call from a thread."""

    def __init__(self) -> None:
        self.groups: dict[str, dist.ProcessGroup] = {}
        self._spare: list[Tensor] = []
        """Buffers of weights that were replaced. Fresh memory of that size would take longer than to fill it."""
        self._received: list[Tensor] = []
        self._in_use: list[Tensor] = []

    def begin(self) -> None:
        """A push begins; what one that broke off has brought is not wanted any more.

        Nor is it spare: a thread of that push may still write to it.
        """
        self._received = []

    def taken(self) -> None:
        """What this push has brought is in use, what the one before brought no longer is."""
        self._spare = [data for data in self._in_use if not data.is_cuda]  # a GPU has a better use for it
        self._in_use, self._received = self._received, []

    def join(
        self, *, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str,
        backend: str, timeout_s: float,
    ) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        store = dist.TCPStore(master_address, master_port, world_size, is_master=False, timeout=timeout)
        self.groups[group_name] = join_group(store, rank_offset, world_size, group_name, backend, timeout_s)

    def receive(
        self, group_name: str, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]],
        device: torch.device | None = None,
    ) -> list[tuple[str, Tensor]]:
        """One bucket. Raises KeyError when `group_name` was never joined, RuntimeError when the sender is lost."""
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
    """A process group beside the default one, in the way SGLang makes its half.

    `torch.distributed.new_group` can't: it wants every member to be in one default group.
    """
    group, _ = _new_process_group_helper(
        world_size, rank, [], Backend(backend), PrefixStore(group_name, store),
        group_name=GroupName(group_name), timeout=datetime.timedelta(seconds=timeout_s),
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
