"""The buffer's part of a checkpoint, and the state it goes on from.

A resume goes on from the cut: what came after it never was. Of the groups that no batch had held yet, those go on whose
payload the journal of the past still has; the prompts of the others are granted again, before fresh ones. So no prompt
is lost or trained on twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from async_rl.storage.checkpoints import TrainingState
from buffer.staleness import Rules, exact_start_version, kept_at, last_batch
from buffer.store_rows import Row
from buffer.store_state import StoreState


def buffer_checkpoint(state: StoreState) -> dict[str, Any]:
    """Plain values: the scalars (prompt cursor, counts) and the groups that no batch has held yet."""
    live = [row for row in state.rows() if row.is_fresh]
    return {
        "scalars": state.scalars(),
        "live": [[row.group_id, row.prompt_index, row.start_version, row.batch] for row in live],
    }


def go_on_from(cut: TrainingState, state: StoreState, rules: Rules, past: Mapping[int, Row]) -> None:
    """Into an empty state: as it was at the cut.

    A group with a token of a version after the cut's is dropped as `future_version`, as its weights are gone; one that
    is too many for the rules, should they have changed, as `late`; one that never arrived, as `failed`.

    Args:
        past: [group id] groups that arrived before the old run ended, whenever that was.
    """
    rows = [
        Row(group_id=g, prompt_index=p, start_version=s, worker="", batch=b) for g, p, s, b in cut.buffer["live"]
    ]
    state.restore(rows, cut.buffer["scalars"])
    state.version, state.served_version = cut.version, None
    state.unserved.clear()
    arrived = []
    for row in rows:
        found = past.get(row.group_id)
        if found is None or found.slot != row.slot:
            state.drop(row, "failed", requeue=True)
        elif found.newest_version > cut.version:
            state.drop(row._replace(outcome=found.outcome), "future_version", requeue=True)
        else:
            finished_version = min(found.finished_version, cut.version)
            arrived.append(row._replace(
                payload=found.payload, outcome=found.outcome, finished_version=finished_version, worker=found.worker
            ))
    if rules.exact and not _is_whole(arrived, cut.version, state.first_version, rules):
        state.first_version = cut.version
        for row in arrived:
            state.drop(row, "failed", requeue=True)
        arrived = []
    arrived.sort(key=lambda row: (_last_batch(row, rules), row.group_id))
    are_kept = kept_at([_last_batch(row, rules) for row in arrived], cut.version, rules)
    for row, is_kept in zip(arrived, are_kept, strict=True):
        if is_kept:
            state.put(row, "finished")
        else:
            state.drop(row, "late", requeue=True)
    state.check_identity()


def _last_batch(row: Row, rules: Rules) -> int:
    return last_batch(row.start_version, row.newest_version, rules)


def _is_whole(rows: list[Row], version: int, first_version: int, rules: Rules) -> bool:
    """Whether exact mode can go on: later versions can't sample the groups of the next `staleness.max` batches."""
    bound = rules.max_staleness
    members = Counter(
        row.batch for row in rows
        if row.start_version == row.newest_version == exact_start_version(row.batch, bound, first_version)
    )
    return members.total() == len(rows) and all(
        members[batch] == rules.prompts_per_step for batch in range(version, version + bound)
    )
