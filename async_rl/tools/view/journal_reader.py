"""Reads a run's journal for the page: read-only, in short queries with a time limit that never block the buffer."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from async_rl.base.errors import AsyncRLError
from async_rl.base.messages.codec import decode_group
from async_rl.base.messages.fields import Limits
from async_rl.base.types import Group
from buffer.journal import Place, check_schema, payload_folder, read_payload

QUERY_LIMIT_S = 2.0
"""The time limit of a query. A longer one would keep SQLite from merging the journal's write-ahead log."""
LOCK_LIMIT_S = 1.0
PAGE_ROWS = 50
PROMPT_BYTES = 64 * 2**10
"""For the list of groups, the prompt is searched in this many bytes at the start of a payload."""
OPCODES_BETWEEN_CHECKS = 10_000
LONGEST_TEXT = 100_000
"""The longest value in a user's query. A call of an SQLite function can't be interrupted, so it must be short."""
NEWEST_TRAINED = "step IS NULL, step DESC, group_id DESC"
"""The default order of groups: the newest trained first, then those not trained."""
_GROUPS = """
    SELECT group_id, prompt_index, NULLIF(data_row, -1) AS data_row, state, drop_reason, worker, start_version,
        NULLIF(finished_version, -1) AS finished_version, reward, response_tokens AS tokens, duration_s,
        (SELECT MAX(version) + 1 FROM uses WHERE uses.group_id = groups.group_id) AS step,
        (SELECT MAX(version) FROM uses WHERE uses.group_id = groups.group_id)
        - (SELECT MIN(oldest_version) FROM rows WHERE rows.group_id = groups.group_id) AS staleness,
        (SELECT MAX(episode) + 1 FROM rows WHERE rows.group_id = groups.group_id) AS answers
    FROM groups"""
"""A row for each group, with the columns that a WHERE clause may use."""
_READING = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


class JournalError(AsyncRLError):
    """The journal can't be shown. The message says why and what to do."""


class JournalReader:
    """Reads groups from a run's journal (trajectories.sqlite), which is opened for each query."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def groups(self, where: str = "", order: str = "", page: int = 0) -> tuple[list[dict[str, Any]], bool]:
        """Return (one page of the groups that meet an SQL condition, whether there are more pages).

        Args:
            where: the user's WHERE clause over the columns of _GROUPS, e.g. `reward > 0.5 AND staleness >= 2`; it may
                query other tables. Empty: all groups.
            order: the user's ORDER BY clause, e.g. `reward DESC`; empty: NEWEST_TRAINED.
            page: number of the page, from 0.

        Raises:
            JournalError: the journal can't be read, a clause is wrong, or the query took too long.
        """
        # The user's text chooses ids. All that is shown comes from a query without it.
        query = (
            f"SELECT group_id FROM ({_GROUPS})\nWHERE {where or 'TRUE'}\nORDER BY {order or NEWEST_TRAINED}\n"
            f"LIMIT {PAGE_ROWS + 1} OFFSET {page * PAGE_ROWS}"
        )
        with self._open() as database:
            database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READING else sqlite3.SQLITE_DENY)
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_TEXT)
            database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 200)
            found = [row[0] for row in database.execute(query).fetchmany(PAGE_ROWS + 1)]
        ids = [each for each in found if isinstance(each, int)]
        rows = {row["group_id"]: row for row in self.rows(f"{_GROUPS} WHERE group_id IN ({', '.join(map(str, ids))})")}
        return [rows[each] for each in ids[:PAGE_ROWS] if each in rows], len(ids) > PAGE_ROWS

    def group(self, group_id: int) -> dict[str, Any] | None:
        """Return the facts about a group, with its `rows`, the `steps` that used it, and its `errors`; None: unknown
        id.
        """
        groups = self.rows(f"{_GROUPS} WHERE group_id = ?", (group_id,))
        if not groups:
            return None
        rows = self.rows("SELECT * FROM rows WHERE group_id = ? ORDER BY row", (group_id,))
        steps = self.rows("SELECT version + 1 AS step FROM uses WHERE group_id = ? ORDER BY version", (group_id,))
        errors = self.rows("SELECT what, error FROM errors WHERE group_id = ?", (group_id,))
        return groups[0] | {"rows": rows, "steps": [row["step"] for row in steps], "errors": errors}

    def payload(self, group_id: int) -> Group | None:
        """Return a group with its tokens; None if the tokens were deleted or not copied, or the group never arrived.

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
        """Return the prompt tokens by group id, without reading answers. Groups whose tokens were deleted are left out.
        """
        marks = ", ".join(map(str, map(int, group_ids)))
        places = self.rows(f"SELECT group_id, file, start, bytes FROM payloads WHERE group_id IN ({marks})")
        found = {}
        for place in places:
            group_id = place.pop("group_id")
            head = Place(**place)._replace(bytes=min(place["bytes"], PROMPT_BYTES))
            with suppress(OSError, ValueError, msgpack.UnpackException):  # removed since, or longer than PROMPT_BYTES
                found[group_id] = _prompt(read_payload(payload_folder(self._file), head))
        return found

    def rows(self, query: str, values: Any = ()) -> list[dict[str, Any]]:
        """Return the rows of one of our own SQL queries, each as a dict by column.

        Raises:
            JournalError: there is no journal, it can't be read, or the query took longer than QUERY_LIMIT_S.
        """
        with self._open() as database:
            return [dict(row) for row in database.execute(query, values)]

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if not self._file.is_file():
            raise JournalError(
                f"{self._file} does not exist: the run or its resume has not begun, it had buffer.journal=false, or "
                "the journal was not copied here."
            )
        # Without a write-ahead log no process writes to the journal. As a file that does not change it needs no file
        # next to it, which SQLite would otherwise create, and the run directory may be read-only.
        has_log = self._file.with_name(f"{self._file.name}-wal").exists()
        uri = f"{self._file.absolute().as_uri()}?mode=ro" + ("" if has_log else "&immutable=1")
        end_s = time.monotonic() + QUERY_LIMIT_S
        try:
            with closing(sqlite3.connect(uri, uri=True, timeout=LOCK_LIMIT_S)) as database:
                database.set_progress_handler(lambda: int(time.monotonic() > end_s), OPCODES_BETWEEN_CHECKS)
                database.row_factory = sqlite3.Row
                check_schema(database, self._file)
                yield database
        except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
            if time.monotonic() > end_s:
                raise JournalError(f"The search took longer than {QUERY_LIMIT_S:g} s. Narrow it.") from None
            raise JournalError(f"The journal can't answer that: {error}.") from None


def _prompt(head: bytes) -> list[int]:
    """Return the prompt tokens of an encoded group from its first bytes.

    Raises:
        ValueError: they are not in these bytes.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=PROMPT_BYTES)
    unpacker.feed(head)
    for _ in range(unpacker.read_map_header()):
        key, value = unpacker.unpack(), unpacker.unpack()
        if key == "prompt_tokens":
            tokens: list[int] = np.frombuffer(value[2], value[0]).tolist()
            return tokens
    raise ValueError("these bytes of a group hold no prompt_tokens")
