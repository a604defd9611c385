"""The learner's own check of the staleness bound: it trains on no batch that it has not checked itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from async_rl.config import StalenessConfig
from async_rl.errors import StalenessError
from async_rl.telemetry.metrics import Metric
from async_rl.types import Batch, RolloutGroup
from buffer.staleness import young_enough


def check_staleness(batch: Batch, version: int, staleness: StalenessConfig) -> tuple[Batch, list[Metric]]:
    """Check every token of the batch against staleness.max, after masking older ones with `staleness.late: mask`.

    Returns:
        The batch, and, if tokens may be masked, metrics of the staleness before masking. The staleness/mean and
        staleness/max that the train step reports are of the tokens that are trained on.

    Raises:
        StalenessError: see check_bound.
    """
    if staleness.late != "mask":
        check_bound(batch, version, staleness.max)
        return batch, []
    masked = replace(batch, groups=tuple(_mask_old(group, version, staleness.max) for group in batch.groups))
    check_bound(masked, version, staleness.max)
    before = [r for group in batch.groups for r in group.rollouts]
    ages = [version - int(r.versions.min()) for r in before]
    kept = sum(int(r.mask.sum()) for group in masked.groups for r in group.rollouts)
    return masked, [
        Metric("staleness/before_mask_mean", float(np.mean(ages))),
        Metric("staleness/before_mask_max", float(max(ages)), "max"),
        Metric("staleness/masked_fraction", 1 - kept / max(1, sum(int(r.mask.sum()) for r in before))),
    ]


def check_bound(batch: Batch, version: int, max_staleness: int) -> None:
    """Check that the batch is for `version` and that each trained token is at most `max_staleness` versions older.

    Raises:
        StalenessError: the batch is for another version, a trained token is too old, or a token is of a later version.
    """
    if batch.version != version:
        raise StalenessError(
            f"the buffer handed out a batch for version {batch.version} to a learner of version {version}"
        )
    for group in batch.groups:
        for rollout in group.rollouts:
            oldest = int(rollout.versions[rollout.mask].min(initial=version))
            newest = int(rollout.versions.max())
            if version - oldest > max_staleness or newest > version:
                bad = oldest if version - oldest > max_staleness else newest
                raise StalenessError(
                    f"group {group.group_id} has a token of version {bad}, but the learner is at version "
                    f"{version} and staleness.max is {max_staleness}: only tokens of versions "
                    f"{max(0, version - max_staleness)}..{version} may be trained on."
                )


def _mask_old(group: RolloutGroup, version: int, max_staleness: int) -> RolloutGroup:
    rollouts = []
    for rollout in group.rollouts:
        mask = rollout.mask & young_enough(rollout.versions, version, max_staleness)
        rollouts.append(replace(rollout, mask=mask, num_too_old=int(rollout.mask.sum() - mask.sum())))
    return replace(group, rollouts=tuple(rollouts))
