"""Takes a batch: rank 0 asks the buffer, shares the answer with all ranks, and each rank checks the age of every token.
"""

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
    """Says why the learner gets no batch now. Every rank gets it in place of the batch.

    `servers wait`: rollout servers have joined and wait for weights; the learner asks again when they have them.
    `checkpoint wanted`: the user's training program wants a checkpoint; the learner asks again after it.
    `paused`: the watcher has paused the run, or too few servers serve; the learner asks again every few seconds.
    `stopped`: the user has stopped the run.
    `ended`: the user's training program has ended the run early, as if it were complete.
    `nothing to learn`: the buffer will hand out no further batch.
    """

    why: Literal["servers wait", "checkpoint wanted", "paused", "stopped", "ended", "nothing to learn"]
    reason: str = ""
    """For `ended` and `nothing to learn`, the text from the program or the buffer that says why no batch follows."""


Taken = Sequence[bytes | memoryview] | NoBatch
"""A batch as the frames that the buffer sent, for `decode_batch`, or a NoBatch that says why there is none."""


def ask_buffer(
    client: LearnerClient, version: int, asked: Callable[[], NoBatch | None], someone_waits: Callable[[], bool]
) -> Taken:
    """Wait on rank 0 for batch number `version`, and return its frames or a NoBatch that says why there is none.

    During a pause this returns without asking the buffer, which might have a batch.

    Args:
        asked: called every few seconds; a NoBatch from it ends the wait, and is returned.
        someone_waits: called every few seconds; True ends the wait with `servers wait`.

    Raises:
        WaitTimeoutError: there was no batch within timeouts.batch_s, and no other reason to end the wait.
    """
    if (wanted := asked()) and wanted.why == "paused":
        return NoBatch("servers wait") if someone_waits() else wanted
    try:
        frames = client.take_raw(version, lambda: asked() is not None or someone_waits())
    except NothingToLearnError as error:
        return NoBatch("nothing to learn", str(error))
    return frames or asked() or NoBatch("servers wait")


def await_push(
    client: LearnerClient | None, version: int, asked: Callable[[], NoBatch | None]
) -> NoBatch | None:
    """Wait on every rank until `version` may be pushed. Returns None, or why the run ends without it. Collective.

    Args:
        client: rank 0's client; None on the other ranks, which get rank 0's answer.
        asked: called every few seconds. Only `stopped` and `ended` end the wait; other requests wait for the push.

    Raises:
        WaitTimeoutError: the version may not be pushed within timeouts.batch_s.
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
    """Send what rank 0 has `taken` to all ranks and return it; the other ranks pass None. Collective.

    The ranks exchange it in CPU memory, by gloo: they wait here while answers are generated, and NCCL would keep their
    GPUs and a core busy with waiting.
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
        The batch. With `mask` also metrics: its staleness before masking, and the shares of masked tokens and turns.
        The oldest trained token of an episode decides its staleness. A turn counts as masked if all of its tokens are.

    Raises:
        StalenessError: as `check_bound` does.
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
    """Check that the batch is for `version`, and that no trained token is more than `max_staleness` versions older.

    Raises:
        StalenessError: the batch is for another version, a trained token is too old, or a token has a later version.
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
