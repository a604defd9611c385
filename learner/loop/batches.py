"""Takes a batch: rank 0 asks the buffer, every rank gets the answer and checks the age of each token to train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import msgpack
import numpy as np
import torch
import torch.distributed as dist

from async_rl.base.config import StalenessConfig
from async_rl.base.errors import NothingToLearnError, StalenessError
from async_rl.base.telemetry.metrics import EPISODES, TOKENS, Metric
from async_rl.base.types import Batch
from buffer.client import LearnerClient
from buffer.staleness import young_enough
from learner.packing import rows_by_episode


@dataclass(frozen=True, slots=True)
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
    pause the buffer is not asked: it may have a batch immediately.

    Raises:
        WaitTimeoutError: there was no batch within timeouts.batch_s, and no other reason to end the wait.
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
        client: rank 0's client; None on the other ranks, which get rank 0's answer.

    Raises:
        WaitTimeoutError: it may not be pushed within timeouts.batch_s.
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
        message: Any = asdict(taken) if isinstance(taken, NoBatch) else taken
        data = torch.frombuffer(bytearray(msgpack.packb(message)), dtype=torch.uint8)
    size = torch.tensor(len(data))
    dist.broadcast(size, 0)
    if taken is None:
        data = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(data, 0)
    received = msgpack.unpackb(data.numpy())
    return NoBatch(**received) if isinstance(received, dict) else received


def check_staleness(batch: Batch, version: int, staleness: StalenessConfig) -> tuple[Batch, list[Metric]]:
    """Check that no trained token is too old, and return the batch; `staleness.on_late: mask` masks such tokens first.

    Returns:
        The batch, and metrics of its staleness before masking, none without `staleness.on_late: mask`. An episode has
        the staleness of its oldest trained token. A turn is masked if all of its tokens are.
    """
    if staleness.on_late != "mask":
        check_bound(batch, version, staleness.max)
        return batch, []
    groups = []
    for group in batch.groups:
        rows = []
        for row in group.rows:
            mask = row.mask & young_enough(row.versions, version, staleness.max)
            rows.append(replace(row, mask=mask, too_old=row.mask & ~mask))
        groups.append(replace(group, rows=tuple(rows)))
    masked = replace(batch, groups=tuple(groups))
    check_bound(masked, version, staleness.max)
    ages = [
        version - min(int(group.rows[row].versions[group.rows[row].mask].min(initial=version)) for row in rows)
        for group in batch.groups for rows in rows_by_episode(group)
    ]  # fmt: skip
    rows = [row for group in masked.groups for row in group.rows]
    kept = sum(int(row.mask.sum()) for row in rows)
    too_old = sum(int(row.sampled.sum()) for row in rows) - kept
    metrics = [
        Metric("staleness/before_mask_mean", float(np.mean(ages)), by=EPISODES, unit="versions"),
        Metric("staleness/before_mask_max", float(max(ages)), "max", unit="versions"),
        Metric("staleness/masked_fraction", 1 - kept / max(1, kept + too_old), by=TOKENS, unit="share"),
    ]
    if any(group.episodes for group in batch.groups):
        # A turn is masked with its last token, as versions do not fall. A row without turn_ends is one turn.
        num_masked = sum(not row.mask[end] for row in rows for end in row.turn_ends or (-1,))
        metrics.append(Metric("episode/masked_turns", float(num_masked), "sum"))
    return masked, metrics


def check_bound(batch: Batch, version: int, max_staleness: int) -> None:
    """Check that the batch is for `version` and that each trained token is at most `max_staleness` versions older.

    Raises:
        StalenessError: the batch is for another version, a trained token is too old, or a token is of a later version.
    """
    if batch.version != version:
        raise StalenessError(
            f"the buffer handed out a batch for version {batch.version} to a learner of version {version}: this is a "
            "bug"
        )
    for group in batch.groups:
        for row in group.rows:
            oldest = int(row.versions[row.mask].min(initial=version))
            newest = int(row.versions.max())
            if version - oldest > max_staleness or newest > version:
                bad = oldest if version - oldest > max_staleness else newest
                raise StalenessError(
                    f"group {group.group_id} has a token of version {bad}, but the learner is at version "
                    f"{version} and staleness.max is {max_staleness}: only tokens of versions "
                    f"{max(0, version - max_staleness)}..{version} may be trained on."
                )
