"""Makes the buffer's part of a training checkpoint, and restores the buffer of a resumed run from it.

Versions after the checkpoint and groups admitted after it are discarded. A group that was in no trained batch yet
continues if its payload (the encoded group) is still in the journal of the earlier run; otherwise its prompt is granted
again, before new ones. So no prompt is lost, and none is trained on twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from async_rl.base.run_dir.checkpoints import TrainingState
from buffer.modes import Mode
from buffer.store_state import StoreState
from buffer.stored_group import StoredGroup


def buffer_checkpoint(state: StoreState) -> dict[str, Any]:
    """Return {"scalars", "live", "streaks"}: the scalars, live groups and prompt streaks of `state`, as plain values.

    The groups are those that are in no trained batch yet, each as [group id, prompt index, start version, number of its
    batch in exact mode or -1]. A streak is there as [position of the question, streak].
    """
    live = [row for row in state.rows() if row.is_fresh]
    return {
        "scalars": state.scalars(),
        "live": [[row.group_id, row.prompt_index, row.start_version, row.exact_batch] for row in live],
        "streaks": [[position, streak] for position, streak in state.prompts.streaks.items()],
    }


def restore_checkpoint(
    saved: TrainingState, state: StoreState, mode: Mode, past: Mapping[int, StoredGroup]
) -> list[int]:
    """Fill the empty `state` from the checkpoint `saved`. The prompt of a group that is dropped here is granted again.

    A group with a token of a version after the checkpoint is dropped as `future_version`, because the weights of that
    version are gone. A group that never arrived is dropped as `failed`, in exact mode every group if a batch would
    stay incomplete. Groups over the capacity, which may have changed, are dropped as `late`. `past` has, by id, the
    groups that arrived before the earlier run ended, even after the checkpoint. The streaks of prompts come from the
    checkpoint.

    Returns the ids of the groups that arrived with tokens of known versions. These alone keep their payloads, and those
    that are dropped for another reason keep them too.
    """
    rows = [
        StoredGroup(group_id=g, prompt_index=p, start_version=s, worker="", exact_batch=b)
        for g, p, s, b in saved.buffer["live"]
    ]
    state.restore(rows, saved.buffer["scalars"], saved.buffer["streaks"])
    state.version, state.served_version = saved.version, None
    state.unserved.clear()
    state.aborts.clear()  # the workers that ran those groups are gone
    arrived = []
    for row in rows:
        found = past.get(row.group_id)
        if found is None or found.slot != row.slot:
            state.drop(row, "failed", requeue=True)
        elif found.newest_version > saved.version:
            state.drop(row._replace(arrival=found.arrival), "future_version", requeue=True)
        else:
            finished_version = min(found.finished_version, saved.version)
            arrived.append(row._replace(
                payload=found.payload, arrival=found.arrival, finished_version=finished_version, worker=found.worker,
                data_row=found.data_row,
            ))
    arrived.sort(key=lambda row: (mode.deadline(row), row.group_id))
    for row, reason in zip(arrived, mode.drops_at_resume(arrived, state, saved.version), strict=True):
        if reason:
            state.drop(row, reason, requeue=True)
        else:
            state.put(row, "finished")
    state.check_accounting()
    return [row.group_id for row in arrived]
