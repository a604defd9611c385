"""The learner's own checks of every batch: no trained token is too old, and no group is used too often.

They also hold after a resume, because the uses of each group are part of the checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
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
        rollouts = []
        for rollout in group.rollouts:
            mask = rollout.mask & young_enough(rollout.versions, version, staleness.max)
            rollouts.append(replace(rollout, mask=mask, num_too_old=int(rollout.mask.sum() - mask.sum())))
        groups.append(replace(group, rollouts=tuple(rollouts)))
    masked = replace(batch, groups=tuple(groups))
    check_bound(masked, version, staleness.max)
    ages = [
        version - min(int(group.rollouts[row].versions[group.rollouts[row].mask].min(initial=version)) for row in rows)
        for group in batch.groups for rows in rows_by_episode(group)
    ]  # fmt: skip
    rows = [rollout for group in masked.groups for rollout in group.rollouts]
    kept, too_old = sum(int(row.mask.sum()) for row in rows), sum(row.num_too_old for row in rows)
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


class TrainedGroupLedger:
    """Counts how often each group was trained on, as ranges of ids, to refuse one that was used too often.

    Ranges keep a checkpoint small: of a million groups, half of them dropped at random, there are 250 000 ranges,
    4.5 MB in a checkpoint.

    Args:
        max_uses: buffer.max_uses.
        ranges: the result of `ranges()` in the checkpoint of a resumed run.
    """

    def __init__(self, max_uses: int, ranges: Sequence[Sequence[Sequence[int]]] = ()) -> None:
        self._edges: list[list[int]] = [[] for _ in range(max_uses)]
        """[use] sorted first id of a range, first id after it, first id of the next range, and so on."""
        for edges, loaded in zip(self._edges, ranges, strict=False):
            edges += [edge for first, last in loaded for edge in (first, last + 1)]

    def add(self, group_ids: Iterable[int]) -> None:
        """Count one use of each group.

        Raises:
            StalenessError: a group was used buffer.max_uses times already. Those before it in `group_ids` are counted.
        """
        for group_id in group_ids:
            edges = next((edges for edges in self._edges if bisect_right(edges, group_id) % 2 == 0), None)
            if edges is None:
                raise StalenessError(
                    f"group {group_id} would be trained on more often than buffer.max_uses = {len(self._edges)}; this "
                    "is a bug"
                )
            for edge in (group_id, group_id + 1):  # begins or ends a range, or joins two that meet there
                place = bisect_left(edges, edge)
                if edges[place : place + 1] == [edge]:
                    del edges[place]
                else:
                    edges.insert(place, edge)

    def ranges(self) -> list[list[list[int]]]:
        """Return a list of one entry for each k = 0, 1, ..., max_uses - 1.

        Entry k has the sorted ranges [first, last] of the ids of the groups that were trained on more than k times.
        """
        return [
            [[first, end - 1] for first, end in zip(edges[::2], edges[1::2], strict=True)] for edges in self._edges
        ]
