"""The learner's own check of every batch: no trained token is too old."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from async_rl.config import StalenessConfig
from async_rl.errors import StalenessError
from async_rl.telemetry.metrics import Metric
from async_rl.types import Batch
from buffer.staleness import young_enough
from learner.episodes import rows_by_episode


def check_staleness(batch: Batch, version: int, staleness: StalenessConfig) -> tuple[Batch, list[Metric]]:
    """Check that no trained token is too old, and return the batch; `staleness.late: mask` masks such tokens first.

    Returns:
        The batch, and metrics of its staleness before masking, none without `staleness.late: mask`. An episode has the
        staleness of its oldest trained token. A turn is masked if all of its tokens are.
    """
    if staleness.late != "mask":
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
        Metric("staleness/before_mask_mean", float(np.mean(ages))),
        Metric("staleness/before_mask_max", float(max(ages)), "max"),
        Metric("staleness/masked_fraction", 1 - kept / max(1, kept + too_old)),
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
