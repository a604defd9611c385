"""Both halves of the words by which a server that generates receives buckets, for engines without endpoints for that.

    learner        announces a bucket: names, types, shapes  ->  each rank of the server, in a thread
    learner        broadcasts its bytes in the push's group  ->  the same thread, which keeps them beside the weights
    learner        waits for the receipts                   <-   "", or why the bucket was not received

The words pass through the store of the push's group. SGLang's endpoints for weights wait until no request runs.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError, PrefixStore, ProcessGroup, Store, TCPStore

from async_rl.config import Limit
from async_rl.errors import WaitTimeoutError, WeightSyncError
from async_rl.weights.bucket import Bucket, bucket_num_bytes, unpack
from async_rl.weights.silent_servers import find_silent

PROBE_S = 2.0
"""Time between two looks at whether a server whose receipt is missing is still alive."""
_FOR_EVER = timedelta(days=1000)
_ANNOUNCED, _RECEIPT = "bucket", "receipt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """A bucket that the learner broadcasts next."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    place: str
    """The memory in which it is to be kept: device or host."""
    is_first: bool
    """Whether it begins a push."""
    is_last: bool


class BucketAnnouncer:
    """The learner's half, for one server: announces buckets and waits for the receipts of the server's ranks.

    Args:
        host, port: where the learner serves the store of the group.
        ranks: the server's ranks in the group.
    """

    def __init__(self, host: str, port: int, group_name: str, ranks: range) -> None:
        self._store = _open_store(host, port, group_name)
        self._ranks = ranks
        self._count = 0

    def announce(
        self, bucket: Bucket, place: str, is_first: bool, limit: Limit, is_alive: Callable[[], bool]
    ) -> None:
        """Have the server receive a bucket, which the learner broadcasts meanwhile, and wait until it has.

        Raises:
            WeightSyncError: the server could not receive the bucket, or has died.
            WaitTimeoutError: there was no receipt within `limit`.
        """
        words = {
            "names": bucket.names, "dtypes": bucket.dtypes, "shapes": bucket.shapes, "place": place,
            "is_first": is_first, "is_last": bucket.is_last,
        }
        key = _key(_ANNOUNCED, self._ranks.start, self._count)
        receipts = [_key(_RECEIPT, rank, self._count) for rank in self._ranks]
        self._count += 1
        self._store.set(key, json.dumps(words))
        self._wait(receipts, limit, is_alive)
        failures = [self._store.get(receipt).decode() for receipt in receipts]
        for used in (key, *receipts):  # else the store would grow with every push
            self._store.delete_key(used)
        if why := next(filter(None, failures), ""):
            raise WeightSyncError(f"the server could not receive a bucket beside its weights: {why}")

    def _wait(self, receipts: list[str], limit: Limit, is_alive: Callable[[], bool]) -> None:
        deadline = time.monotonic() + limit.seconds
        while True:
            with suppress(DistError):
                self._store.wait(receipts, timedelta(seconds=PROBE_S))
                return
            if find_silent({"server": is_alive}):
                raise WeightSyncError("the server has died while it received a bucket")
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"the learner waited {limit} for a server to receive a bucket")


def receive_announced(
    group: ProcessGroup, group_name: str, host: str, port: int, rank: int, first_rank: int,
    keep: Callable[[list[tuple[str, Tensor]], Announcement], None], device: torch.device,
) -> None:
    """Start a thread of a server that receives the buckets that are announced, until the learner's store is gone.

    Args:
        rank: this process's rank in the group.
        first_rank: the rank in the group of the server's first process.
        keep: is called with the tensors of each bucket, and may raise.
    """
    store = _open_store(host, port, group_name)

    def receive(announced: Announcement) -> None:
        names, dtypes, shapes = announced.names, announced.dtypes, announced.shapes
        data = torch.empty(bucket_num_bytes(dtypes, shapes), dtype=torch.uint8, device=device)
        dist.broadcast(data, group=group, group_src=0)
        keep(unpack(data, names, dtypes, shapes), announced)

    def work() -> None:
        with suppress(DistError, RuntimeError), torch.no_grad(), _own_stream(device):  # the learner's store is gone
            for number in itertools.count():
                key = _key(_ANNOUNCED, first_rank, number)
                store.wait([key], _FOR_EVER)
                why = ""
                try:
                    receive(Announcement(**json.loads(store.get(key))))
                    if device.type == "cuda":
                        torch.cuda.current_stream(device).synchronize()
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                store.set(_key(_RECEIPT, rank, number), why)

    threading.Thread(target=work, name=f"buckets of {group_name}", daemon=True).start()


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which this thread works on a GPU beside what the server computes; none is needed on a CPU."""
    if device.type == "cpu":
        return nullcontext()
    torch.cuda.set_device(device)  # of this thread
    return torch.cuda.stream(torch.cuda.Stream(device))


def _open_store(host: str, port: int, group_name: str) -> Store:
    return PrefixStore(group_name, TCPStore(host, port, is_master=False, wait_for_workers=False))


def _key(word: str, rank: int, number: int) -> str:
    return f"{word}/{rank}/{number}"
