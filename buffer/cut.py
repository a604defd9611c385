"""The buffer's part of a checkpoint, and the state it goes on from.

What was finished but not trained on is not kept: those prompts are granted again, before fresh ones, so no prompt is
lost or trained on twice.
"""

from __future__ import annotations

from typing import Any

from async_rl.checkpoints import Cut
from buffer.store_rows import Row
from buffer.store_state import StoreState


def cut_of(state: StoreState) -> dict[str, Any]:
    """Plain values: the scalars (prompt cursor, counts) and the groups that no batch has held yet."""
    live = [row for row in state.rows() if row.is_fresh]
    return {
        "scalars": state.scalars(),
        "live": [[row.group_id, row.prompt_index, row.start_version] for row in live],
    }


def go_on_from(cut: Cut, state: StoreState) -> None:
    """Into an empty state: as it was at the cut, all groups given up (counted as failed) and their prompts requeued."""
    rows = [Row(group_id=g, prompt_index=p, start_version=s, worker="") for g, p, s in cut.buffer["live"]]
    state.restore(rows, cut.buffer["scalars"])
    state.rewind(cut.version)
