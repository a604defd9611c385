"""Rank 0 of the learner asks the buffer for a batch or for a push, and every rank gets its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgpack
import torch
import torch.distributed as dist

from async_rl.errors import NothingToLearnError
from buffer.client import LearnerClient


@dataclasses.dataclass(frozen=True, slots=True)
class NoBatch:
    """The reason why there is no batch, which every rank gets in its place.

    `push wanted`: a rollout server came back and waits for weights; the batch is asked for again after the push.
    `checkpoint wanted`: so does the program that trains; the batch is asked for again after the checkpoint.
    `paused`: the watcher has paused the run; the batch is asked for again, also while the pause lasts.
    `stopped`: the user has stopped the run. `ended`: the program has ended it early, as if it were complete.
    `nothing to learn`: the buffer will hand out no batch any more.
    """

    why: Literal["push wanted", "checkpoint wanted", "paused", "stopped", "ended", "nothing to learn"]
    reason: str = ""
    """The reason of the buffer or of the program why no batch will follow."""


Taken = Sequence[bytes | memoryview] | NoBatch
"""The frames of a batch as the buffer sent them, for `decode_batch`, or why there is none."""


def ask_buffer(
    client: LearnerClient, version: int, asked: Callable[[], NoBatch | None], is_push_wanted: Callable[[], bool]
) -> Taken:
    """Wait on rank 0 for batch number `version` and return its frames, or a NoBatch that says why there is none.

    Every few seconds `asked` and `is_push_wanted` are called; the wait ends if one of them returns something true. In a
    pause the buffer is not asked: it may have a batch at once.

    Raises:
        WaitTimeoutError: there was no batch within timeouts.work_s, and no other reason to end the wait.
    """
    if (wanted := asked()) and wanted.why == "paused":
        return NoBatch("push wanted") if is_push_wanted() else wanted
    try:
        frames = client.take_raw(version, lambda: asked() is not None or is_push_wanted())
    except NothingToLearnError as error:
        return NoBatch("nothing to learn", str(error))
    return frames or asked() or NoBatch("push wanted")


def await_push(
    client: LearnerClient | None, version: int, asked: Callable[[], NoBatch | None]
) -> NoBatch | None:
    """Wait on every rank until `version` may be pushed; return None, or why the run ends without that push. Collective.

    Of what is `asked` for, only an end is heeded here: the rest comes after the push.

    Args:
        client: rank 0's; the other ranks have none, and do what it is told.

    Raises:
        WaitTimeoutError: it may not be pushed within timeouts.work_s.
    """

    def asked_end() -> NoBatch | None:
        wanted = asked()
        return wanted if wanted and wanted.why in ("stopped", "ended") else None

    told: Taken | None = None
    if client:
        try:
            client.await_push(version, lambda: asked_end() is not None)
            told = asked_end() or []
        except NothingToLearnError as error:
            told = NoBatch("nothing to learn", str(error))
    told = share_taken(told)
    return told if isinstance(told, NoBatch) else None


def share_taken(taken: Taken | None) -> Taken:
    """Return what rank 0 has `taken` on every rank; the other ranks pass None. Collective.

    It goes through CPU memory, by gloo, because the others wait here for as long as answers are generated: NCCL would
    run a kernel on each of their GPUs until then, and keep a core busy.
    """
    data = torch.empty(0, dtype=torch.uint8)
    if taken is not None:
        message: Any = dataclasses.asdict(taken) if isinstance(taken, NoBatch) else taken
        data = torch.frombuffer(bytearray(msgpack.packb(message)), dtype=torch.uint8)
    size = torch.tensor(len(data))
    dist.broadcast(size, 0)
    if taken is None:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0)
    received = msgpack.unpackb(data.numpy())
    return NoBatch(**received) if isinstance(received, dict) else received
