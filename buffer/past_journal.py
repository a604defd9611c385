"""Reads the journal of the run before a resume. A new run does not load this module."""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from async_rl.base.errors import AsyncRLError
from async_rl.base.run_dir.checkpoints import TrainingState
from buffer.journal import (
    ARRIVED_TABLES,
    Journal,
    Place,
    by_name,
    check_schema,
    file_numbers,
    payload_folder,
    read_payload,
    row_of,
)
from buffer.store_state import StoredGroup

_IMPORT = (
    "REPLACE INTO groups SELECT * FROM past.groups "
    "WHERE group_id < :next_id AND group_id NOT IN (SELECT value FROM json_each(:live))",
    # Batches after the checkpoint, which a group may have been in as well, are discarded.
    "UPDATE groups SET state = 'trained', final_version = min(ifnull(final_version, :version), :version) "
    "WHERE state <> 'dropped'",
    *(
        f"REPLACE INTO {table} SELECT * FROM past.{table} WHERE group_id IN (SELECT group_id FROM groups)"
        for table in ARRIVED_TABLES
    ),
    "REPLACE INTO uses SELECT * FROM past.uses "
    "WHERE version < :version AND group_id IN (SELECT group_id FROM groups)",
    "REPLACE INTO payloads SELECT * FROM past.payloads "
    "WHERE group_id IN (SELECT group_id FROM groups) AND file IN (SELECT value FROM json_each(:files))",
)


def import_past(journal: Journal, past: Path, saved: TrainingState) -> None:
    """Copy groups trained or dropped before the checkpoint `saved` from the journal at `past` into a new one.

    So after a resume the tables describe the whole run, without the groups after the checkpoint. Does nothing if there
    is no journal at `past`. A second call is harmless.

    Raises:
        AsyncRLError: `past` can't be read to its end.
    """
    if not _has_commits(past):
        return
    numbers = {
        "version": saved.version, "next_id": saved.buffer["scalars"]["next_group_id"],
        "live": json.dumps([group_id for group_id, *_ in saved.buffer["live"]]),
    }
    try:
        numbers["files"] = json.dumps(share_files(payload_folder(past), payload_folder(journal.file)))
        journal.copy_from(past, _IMPORT, numbers)
    except (sqlite3.Error, OSError) as error:
        raise AsyncRLError(
            f"the journal of the run before the resume, {past}, can't be copied into {journal.file}: {error}. Free "
            "some disk. If the file is damaged, move it away: the run then continues without its earlier groups"
        ) from None


def read_arrived(file: Path, group_ids: Iterable[int]) -> dict[int, StoredGroup]:
    """Return {group id: stored group} of the groups in `group_ids` that arrived and still have a payload.

    Dropped groups are left out, unless the reason was the end of the run (`shutdown`). Groups that can't be read are
    left out too, and a resumed run generates them again. Without a journal at `file` the result is {}.
    """
    rows = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(sqlite3.Error))
        db = stack.enter_context(contextlib.closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=rw", uri=True)))
        check_schema(db, file)
        for group_id in group_ids:
            found = by_name(db).execute(
                "SELECT * FROM groups JOIN payloads USING (group_id) WHERE group_id = ? "
                "AND ifnull(drop_reason, '') IN ('', 'shutdown')", (group_id,)
            ).fetchone()
            if found:
                with contextlib.suppress(OSError):
                    payload = read_payload(payload_folder(file), Place(*map(found.__getitem__, Place._fields)))
                    rows[group_id] = row_of(found, (), payload)
    return rows


def _has_commits(file: Path) -> bool:
    """Return whether `file` is a journal with at least one commit."""
    if file.is_file():
        with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(file)) as db:
            check_schema(db, file)
            return db.execute("SELECT scalars FROM state").fetchone() is not None
    return False


def share_files(source: Path, target: Path) -> list[int]:
    """Hard-link every payload file in the folder `source` into the folder `target`, or copy it if the disk can't link.

    Returns the numbers of the files; [] if there is no folder `source`. Links are safe because no file is appended to.
    """
    numbers = file_numbers(source) if source.is_dir() else []
    for number in numbers:
        path, copy = source / str(number), target / str(number)
        if not copy.exists():
            try:
                copy.hardlink_to(path)
            except OSError:
                shutil.copyfile(path, copy)
    return numbers
