"""Weights that an SGLang server receives while it generates, and their swap into use during a pause.

SGLang itself loads them into a copy of its module tree that has its own parameters. So names, fused layers and the
shards of a tensor-parallel rank are handled as in every other update. `swap` is a custom weight loader of SGLang, its
public hook for code in the process that owns the model.

The copy is filled with NaN before each push. A parameter that still contains a NaN afterwards was not loaded and is not
swapped, so the weight in use stays, as in an update without staging.

`BucketAnnouncer` is the learner's half. Everything else runs in the server.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DistError, PrefixStore, ProcessGroup, Store, TCPStore

from async_rl.base.config import Limit
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.weights.servers import Bucket, find_silent
from async_rl.base.weights.sums import holds_nan
from async_rl.base.weights.transport import FOR_EVER, bucket_num_bytes, own_stream, unpack

PROBE_S = 2.0
"""The time between two checks whether a server whose receipt is missing is still alive."""
_ANNOUNCED, _RECEIPT = "bucket", "receipt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """Describes the bucket that the learner broadcasts next."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    place: str
    """Where the server stores it: device or host memory."""
    is_first: bool
    """Whether it is the first bucket of a push."""
    is_last: bool


class BucketAnnouncer:
    """Announces buckets to one server (on the learner's side), and waits until the server's ranks confirm them.

        learner   announces a bucket: names, types, shapes   ->  each rank of the server, in a thread
        learner   broadcasts its bytes in the push's group   ->  the same thread, which stores them next to the weights
        learner   waits for each rank's receipt              <-  "", or why the bucket was not received

    So a server can receive weights while it generates, unlike by SGLang's own endpoints, which wait until no request
    runs.

    Args:
        host, port: where the learner serves the group's TCP store, through which both sides communicate.
        ranks: the server's ranks in the group.
    """

    def __init__(self, host: str, port: int, group_name: str, ranks: range) -> None:
        self._store = _open_store(host, port, group_name)
        self._ranks = ranks
        self._count = 0

    def announce(
        self, bucket: Bucket, place: str, is_first: bool, limit: Limit, is_alive: Callable[[], bool]
    ) -> None:
        """Announce a bucket, which the learner broadcasts at the same time, and wait until the server has received it.

        Args:
            place: where the server stores it: device or host.

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
            raise WeightSyncError(f"the server could not receive a bucket next to its weights: {why}")

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
    """Start a thread of a server that receives announced buckets until the learner's store is gone.

    Args:
        host, port: where the learner serves the group's store.
        rank: this process's rank in the group.
        first_rank: the group rank of the server's first process.
        keep: called with the tensors of each bucket; it may raise.
    """
    store = _open_store(host, port, group_name)

    def receive(announced: Announcement) -> None:
        names, dtypes, shapes = announced.names, announced.dtypes, announced.shapes
        data = torch.empty(bucket_num_bytes(dtypes, shapes), dtype=torch.uint8, device=device)
        dist.broadcast(data, group=group, group_src=0)
        keep(unpack(data, names, dtypes, shapes), announced)

    def work() -> None:
        with suppress(DistError, RuntimeError), torch.no_grad(), own_stream(device):  # the learner's store is gone
            for number in itertools.count():
                key = _key(_ANNOUNCED, first_rank, number)
                store.wait([key], FOR_EVER)
                why = ""
                try:
                    receive(Announcement(**json.loads(store.get(key))))
                    if device.type == "cuda":
                        torch.cuda.current_stream(device).synchronize()
                except Exception as error:
                    why = f"{type(error).__name__}: {error}"
                store.set(_key(_RECEIPT, rank, number), why)

    threading.Thread(target=work, name=f"buckets of {group_name}", daemon=True).start()


def _open_store(host: str, port: int, group_name: str) -> Store:
    return PrefixStore(group_name, TCPStore(host, port, is_master=False, wait_for_workers=False))


def _key(word: str, rank: int, number: int) -> str:
    return f"{word}/{rank}/{number}"


class StagedWeights:
    """A second set of the model's weights, into which the parts of a push are loaded."""

    def __init__(self) -> None:
        self._copy: Any = None
        """The model's tree of modules with other parameters; None: there was no push yet."""
        self._place = ""
        self._loaded: list[tuple[Tensor, Tensor]] = []
        """(parameter in use, its staged value) of all that a complete push has loaded; [] before its last part."""

    def load(self, model: nn.Module, named_tensors: list[tuple[str, Tensor]], announced: Announcement) -> None:
        """Load a part of a push into the second set. The model in use does not change."""
        if announced.is_first:
            self._loaded = []
            if self._copy is None or self._place != announced.place:
                self._copy = None  # its memory is needed for the new one
                self._copy, self._place = copy_of(model, announced.place), announced.place
            for parameter in self._copy.parameters():
                _erase(parameter)
        self._copy.load_weights(named_tensors)
        if announced.is_last:
            pairs = zip(model.parameters(), self._copy.parameters(), strict=True)
            self._loaded = [(used.data, staged.data) for used, staged in pairs if _is_loaded(staged)]

    def swap(self, model: Any) -> None:
        """Copy the staged weights over the model's own weights. Captured CUDA graphs use the addresses of the latter.

        Raises:
            ValueError: no complete push was staged since the last swap, or the model's weights have another layout.
        """
        loaded, self._loaded = self._loaded, []
        if not loaded:
            raise ValueError("no complete set of weights was staged")
        for used, staged in loaded:
            if used.shape != staged.shape or used.dtype != staged.dtype:
                raise ValueError(f"a weight has the shape {tuple(used.shape)}, its staged value {tuple(staged.shape)}")
        for used, staged in loaded:
            used.copy_(staged, non_blocking=True)
        if loaded[0][0].is_cuda:
            torch.cuda.current_stream().synchronize()  # the next push overwrites what is copied from
        if hasattr(model, "post_load_weights"):  # computes what the model derives of its weights; SGLang asks likewise
            model.post_load_weights()


_staged = StagedWeights()
"""The staged weights of this process, which has one model."""


def load(model: nn.Module, named_tensors: list[tuple[str, Tensor]], announced: Announcement) -> None:
    """Load a part of a push into the staged weights; see StagedWeights.load."""
    _staged.load(model, named_tensors, announced)


def swap(model: nn.Module, named_tensors: list[Any]) -> None:
    """Put the staged weights into use. SGLang calls this as a custom loader, while paused, with no tensors."""
    _staged.swap(model)


def copy_of(model: nn.Module, place: str) -> nn.Module:
    """Return a copy of the module tree with its own parameters.

    Parameters that are tied in the model are tied in the copy.

    A stand-in with the same `named_parameters` is not enough: SGLang's `load_weights` visits the submodules, and would
    write into the weights in use where a submodule is not copied.

    Args:
        place: where the copy's parameters are: `device` (the model's own) or `host`.
    """
    memo: dict[int, Any] = {}

    def of_module(module: nn.Module) -> nn.Module:
        if id(module) not in memo:
            memo[id(module)] = copy = object.__new__(type(module))
            copy.__dict__ = dict(module.__dict__)
            copy.__dict__["_parameters"] = {
                name: None if p is None else of_parameter(p) for name, p in module._parameters.items()
            }
            copy.__dict__["_modules"] = {
                name: None if m is None else of_module(m) for name, m in module._modules.items()
            }
        return memo[id(module)]

    def of_parameter(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in memo:
            data = torch.empty_like(
                parameter.data, device=None if place == "device" else "cpu",
                pin_memory=place == "host" and parameter.is_cuda,
            )
            memo[id(parameter)] = copy = nn.Parameter(data, requires_grad=False)
            copy.__class__ = parameter.__class__
            copy.__dict__.update(parameter.__dict__)  # its loader among them, which takes the parameter to load
        return memo[id(parameter)]

    return of_module(model)


def _erase(parameter: nn.Parameter) -> None:
    if parameter.is_floating_point():
        parameter.data.fill_(torch.nan)


def _is_loaded(parameter: nn.Parameter) -> bool:
    floats = parameter.is_floating_point() and parameter.numel() > 0
    return floats and not holds_nan(parameter.data)
