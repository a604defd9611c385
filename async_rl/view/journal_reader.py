"""Reads a run's journal for the page: read-only, in short queries with a time limit that never block the buffer."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from async_rl.errors import AsyncRLError
from async_rl.messages.codec import decode_group
from async_rl.messages.limits import Limits
from async_rl.storage.resuming import resuming_since_s
from async_rl.types import Group
from buffer.journal.journal import check_schema, payload_folder
from buffer.journal.payload_files import Place, read_payload

QUERY_LIMIT_S = 2.0
"""A query that takes longer is ended, so that it never keeps the journal's log from being merged."""
LOCK_LIMIT_S = 1.0
PAGE_ROWS = 50
PROMPT_BYTES = 64 * 2**10
"""The part of a payload, from its start, in which the list of groups looks for the prompt."""
OPCODES_BETWEEN_CHECKS = 10_000

_STALENESS = (
    "(SELECT MAX(version) FROM uses WHERE uses.group_id = groups.group_id) - "
    "(SELECT MIN(oldest_version) FROM rows WHERE rows.group_id = groups.group_id)"
)
_COLUMNS = f"""NULLIF(finished_version, -1) AS finished_version, NULLIF(newest_version, -1) AS newest_version,
    NULLIF(data_row, -1) AS data_row, {_STALENESS} AS staleness,
    (SELECT MAX(version) + 1 FROM uses WHERE uses.group_id = groups.group_id) AS step,
    (SELECT MAX(episode) + 1 FROM rows WHERE rows.group_id = groups.group_id) AS answers, groups.*"""
"""The columns of `groups`, of which those before it replace some: sqlite3.Row reads the first one of a name."""
ORDERS = {
    "newest": "group_id DESC", "oldest": "group_id", "reward_high": "reward DESC, group_id DESC",
    "reward_low": "reward IS NULL, reward, group_id DESC", "longest": "response_tokens DESC, group_id DESC",
    "stalest": "staleness DESC, group_id DESC",
}  # fmt: skip
"""The orders in which groups can be listed."""
_CONDITIONS = {
    "step": "group_id IN (SELECT group_id FROM uses WHERE version = :step - 1)",
    "reward_min": "reward >= :reward_min",
    "reward_max": "reward <= :reward_max",
    "staleness_min": f"{_STALENESS} >= :staleness_min",
    "staleness_max": f"{_STALENESS} <= :staleness_max",
    "tokens_min": "response_tokens >= :tokens_min",
    "tokens_max": "response_tokens <= :tokens_max",
    "state": "state = :state",
    "drop_reason": "drop_reason = :drop_reason",
    "worker": "worker = :worker",
    "end": "group_id IN (SELECT group_id FROM episodes WHERE end = :end)",
    "prompt": "prompt_index = :prompt",
}

_CHOICES = {"state": "groups", "drop_reason": "groups", "worker": "groups", "end": "episodes"}
"""The filters that offer the values of a column, and the table of each."""


class JournalError(AsyncRLError):
    """The journal can't be shown. The message says why, and what may be done."""


@dataclass(frozen=True, slots=True)
class GroupPage:
    """One page of a list of groups: their rows, and whether there are more pages."""

    rows: list[dict[str, Any]]
    has_more: bool


class JournalReader:
    """Reads groups from a run's journal (trajectories.sqlite), which it opens anew for each query."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def exists(self) -> bool:
        return self._file.is_file()

    @property
    def inode(self) -> int | None:
        """The number by which its disk knows the file; another one after a resume, which begins a new journal."""
        with suppress(OSError):
            return self._file.stat().st_ino
        return None

    def groups(self, filters: dict[str, Any], order: str, page: int, ids: Sequence[int] | None = None) -> GroupPage:
        """Return one page of the groups that meet all filters.

        Args:
            filters: values by the names in _CONDITIONS.
            order: a name in ORDERS.
            page: number of the page, from 0 on.
            ids: the groups to choose from; None: all.

        Raises:
            JournalError: the journal can't be read, or the query took too long.
        """
        conditions = [_CONDITIONS[name] for name in filters]
        values: dict[str, Any] = {**filters, "limit": PAGE_ROWS + 1, "offset": page * PAGE_ROWS}
        if ids is not None:
            conditions.append(f"group_id IN ({', '.join(map(str, map(int, ids)))})")
        where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
        query = f"SELECT {_COLUMNS} FROM groups {where} ORDER BY {ORDERS[order]} LIMIT :limit OFFSET :offset"
        rows = self.rows(query, values)
        return GroupPage(rows[:PAGE_ROWS], len(rows) > PAGE_ROWS)

    def group(self, group_id: int) -> dict[str, Any] | None:
        """Return what the journal has of a group; or None.

        `rows` are its rows, `steps` those that used it, `errors` its errors.
        """
        groups = self.rows(f"SELECT {_COLUMNS} FROM groups WHERE group_id = ?", (group_id,))
        if not groups:
            return None
        rows = self.rows("SELECT * FROM rows WHERE group_id = ? ORDER BY row", (group_id,))
        steps = self.rows("SELECT version + 1 AS step FROM uses WHERE group_id = ? ORDER BY version", (group_id,))
        errors = self.rows("SELECT what, error FROM errors WHERE group_id = ?", (group_id,))
        return groups[0] | {"rows": rows, "steps": [row["step"] for row in steps], "errors": errors}

    def choices(self) -> dict[str, list[str]]:
        """Return the values that occur in the columns of _CHOICES, by the name of the filter."""
        found = {}
        for column, table in _CHOICES.items():
            query = (
                f"SELECT DISTINCT {column} AS value FROM {table} WHERE ifnull({column}, '') <> '' ORDER BY 1 LIMIT 200"
            )
            found[column] = [str(row["value"]) for row in self.rows(query)]
        return found

    def payload(self, group_id: int) -> Group | None:
        """Return a group with its tokens; None if these were removed or not copied, or the group never arrived.

        Raises:
            JournalError: the journal can't be read, or another version of this program wrote the group.
        """
        rows = self.rows("SELECT file, start, bytes FROM payloads WHERE group_id = ?", (group_id,))
        if not rows:
            return None
        episodes = self.rows("SELECT MAX(episode) + 1 AS number FROM rows WHERE group_id = ?", (group_id,))
        try:
            data = read_payload(payload_folder(self._file), Place(**rows[0]))
        except OSError:
            return None  # removed since the query, or not copied here
        try:
            return decode_group(data, Limits.of_stored(data, episodes[0]["number"]))
        except AsyncRLError as error:
            raise JournalError(f"The tokens of group {group_id} can't be decoded: {error}.") from None

    def prompts(self, group_ids: Sequence[int]) -> dict[int, list[int]]:
        """Return the prompt tokens by group id, without reading answers; groups whose tokens are gone are left out."""
        marks = ", ".join(map(str, map(int, group_ids)))
        places = self.rows(f"SELECT group_id, file, start, bytes FROM payloads WHERE group_id IN ({marks})")
        found = {}
        for place in places:
            group_id = place.pop("group_id")
            head = Place(**place)._replace(bytes=min(place["bytes"], PROMPT_BYTES))
            with suppress(OSError, ValueError, msgpack.UnpackException):  # removed since, or longer than PROMPT_BYTES
                found[group_id] = _prompt(read_payload(payload_folder(self._file), head))
        return found

    def rows(self, query: str, values: Any = (), limit_s: float = QUERY_LIMIT_S) -> list[dict[str, Any]]:
        """Return the rows of an SQL query, each as a dict by column.

        Raises:
            JournalError: there is no journal, it can't be read, or the query took longer than `limit_s`.
        """
        with self._open(limit_s) as database:
            return [dict(row) for row in database.execute(query, values)]

    @contextmanager
    def _open(self, limit_s: float) -> Iterator[sqlite3.Connection]:
        if not self._file.is_file():
            if resuming_since_s(self._file.parent) is not None:
                raise JournalError(
                    "A resume of this run is starting. Its groups are listed as soon as its buffer has restored them."
                )
            raise JournalError(
                f"{self._file} does not exist: the run has not begun, it had buffer.journal=false, or the journal was "
                "not copied here."
            )
        end_s = time.monotonic() + limit_s
        try:
            with closing(self._connect()) as database:
                database.set_progress_handler(lambda: int(time.monotonic() > end_s), OPCODES_BETWEEN_CHECKS)
                database.row_factory = sqlite3.Row
                check_schema(database, self._file)
                yield database
        except sqlite3.Error as error:
            if time.monotonic() > end_s:
                raise JournalError(f"The search took longer than {limit_s:g} s and was ended. Narrow it.") from None
            raise JournalError(
                f"{self._file} can't be read: {error}. Load the page again; the file may be half copied."
            ) from None

    def _connect(self) -> sqlite3.Connection:
        """Return a connection to the journal that writes no file beside it.

        Without a write-ahead log no process writes to the journal, and it is opened as a file that does not change:
        otherwise SQLite would create files in the run directory, which may be read-only.
        """
        has_log = self._file.with_name(f"{self._file.name}-wal").exists()
        uri = f"{self._file.absolute().as_uri()}?mode=ro" + ("" if has_log else "&immutable=1")
        try:
            database = sqlite3.connect(uri, uri=True, timeout=LOCK_LIMIT_S)
            database.execute("SELECT 1 FROM sqlite_master").fetchone()
        except sqlite3.OperationalError:
            if not has_log:
                raise
            # A copy in a folder that can't be written to, with a log: show all that the log's owner has merged.
            uri = f"{self._file.absolute().as_uri()}?mode=ro&immutable=1"
            database = sqlite3.connect(uri, uri=True, timeout=LOCK_LIMIT_S)
        return database


def _prompt(head: bytes) -> list[int]:
    """Return the prompt tokens in the first bytes of an encoded group. ValueError: they are not in these bytes."""
    unpacker = msgpack.Unpacker(max_buffer_size=PROMPT_BYTES)
    unpacker.feed(head)
    for _ in range(unpacker.read_map_header()):
        key, value = unpacker.unpack(), unpacker.unpack()
        if key == "prompt_tokens":
            tokens: list[int] = np.frombuffer(value[2], value[0]).tolist()
            return tokens
    raise ValueError("these bytes of a group hold no prompt_tokens")
