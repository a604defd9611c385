"""The journal: the buffer's whole state in SQLite, committed before the buffer answers. A restarted buffer reads it.

The columns of the tables follow from the fields declared in async_rl/base/types.py and store_state.py:

    groups     one line for each group ever admitted, with its state
    rows       one line for each row of a group that arrived
    episodes   one line for each episode of several turns, none for the answer to a question
    left_out   one line for each episode that has no row, because it failed or was dropped
    turns      one line for each turn that a row of such an episode trains
    uses       one line for each batch that a group was trained in
    payloads   the place of each encoded group in the files of PAYLOADS_NAME; trained and dropped groups are kept for
               Config.journal_kept_steps versions
    streaks    with task.difficulty, one line for each prompt that has had a group: its position in the task, and
               the number of its last groups in a row that were all right (> 0) or all not right (< 0)
    state      the scalars of buffer/store_state.py (versions, next ids, counts), as JSON

Users may read the tables while the run continues: see "Trajectories in SQL" in the documentation.

Encoded groups (payloads) are in files next to the database. SQLite would write a payload three times, which takes
longer than all other work of the buffer. Here a payload is appended to the newest file. A file is deleted once all of
its payloads may be deleted. If the machine stops, the last payloads may be lost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, get_type_hints

from async_rl.base.errors import AsyncRLError
from async_rl.base.messages import codec
from async_rl.base.messages.codec import GroupColumns
from async_rl.base.types import (
    EpisodeFacts,
    Flag,
    GroupFacts,
    Metrics,
    Number,
    PerTurn,
    Row,
    Scalar,
    Texts,
    Whole,
    kinds_of,
)
from buffer.store_state import Arrival, StoredGroup, StoreState
from buffer.wire import view

FILE_BYTES = 64 * 2**20
"""A payload file of this size is full, and the next payload starts a new file. Only whole files are deleted."""


class Place(NamedTuple):
    """Where a payload is: the number of its file, the offset of its first byte, and its length in bytes."""

    file: int
    start: int
    bytes: int


class PayloadFiles:
    """Appends payloads to numbered files in a folder, and deletes each file once none of its payloads is needed.

    The file that is being written is never deleted. Every method raises OSError if the folder or a file can't be read
    or written.

    Args:
        kept: the places of payloads that an earlier buffer wrote and that are still needed. Files without any are
            deleted immediately.
    """

    def __init__(self, folder: Path, kept: Iterable[Place]) -> None:
        self._folder = folder
        self._kept = Counter(place.file for place in kept)
        folder.mkdir(parents=True, exist_ok=True)
        there = set(file_numbers(folder))
        for number in there - self._kept.keys():
            (folder / str(number)).unlink()
        # Never append to the last file of a buffer that was killed: its last write may be incomplete.
        self._newest = max(there, default=-1)
        self._end = FILE_BYTES
        self._file: BinaryIO | None = None

    def append(self, payloads: Sequence[memoryview]) -> list[Place]:
        """Write payloads to the end of the newest file, or to a new one if it is full, and return the place of each."""
        places = []
        for payload in payloads:
            if self._end >= FILE_BYTES:
                self._begin()
            assert self._file is not None
            self._file.write(payload)
            places.append(Place(self._newest, self._end, len(payload)))
            self._end += len(payload)
            self._kept[self._newest] += 1
        if self._file is not None:
            self._file.flush()
        return places

    def remove(self, places: Iterable[Place]) -> None:
        """Mark the payloads at `places` as no longer needed, and delete the files that only have such payloads."""
        for place in places:
            self._kept[place.file] -= 1
            if not self._kept[place.file]:
                del self._kept[place.file]
                if place.file != self._newest:
                    (self._folder / str(place.file)).unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _begin(self) -> None:
        self.close()
        if self._newest >= 0 and not self._kept[self._newest]:
            (self._folder / str(self._newest)).unlink(missing_ok=True)
        self._newest += 1
        self._end = 0
        self._file = (self._folder / str(self._newest)).open("xb")


def file_numbers(folder: Path) -> list[int]:
    """Return the numbers of the payload files in a folder. Other files, such as NFS's .nfs0000a1, are ignored."""
    return [int(path.name) for path in folder.iterdir() if path.name.isascii() and path.name.isdecimal()]


def read_payload(folder: Path, place: Place) -> bytes:
    """Return the payload at a place. Raises OSError if the file is missing or too short."""
    with (folder / str(place.file)).open("rb") as file:
        file.seek(place.start)
        data = file.read(place.bytes)
    if len(data) != place.bytes:
        raise OSError(f"the payload file {folder / str(place.file)} ends before byte {place.start + place.bytes}")
    return data


_SQL_TYPES: dict[type, str] = {
    **dict.fromkeys((int, bool, Whole, Flag), "INTEGER"), **dict.fromkeys((float, Number), "REAL"),
}
"""The SQL type of each Python type or kind of field. All others have TEXT."""


def _columns(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return {field name: SQL type}. The values of `fields` are Python types, or kinds of async_rl/base/types.py."""
    return {
        name: _SQL_TYPES.get(of if isinstance(of, type) else type(of), "TEXT") for name, of in fields.items()
    }


ROW_COLUMNS = tuple(name for name in StoredGroup._fields if name not in ("arrival", "trained_versions", "payload"))
_OF_STORE = {name: get_type_hints(StoredGroup)[name] for name in ROW_COLUMNS} | get_type_hints(Arrival)
_OF_GROUP = kinds_of(GroupFacts, Scalar)
ARRIVED_COLUMNS = tuple(name for name in _OF_GROUP if name not in _OF_STORE)
"""The columns of `groups` that are written when a group arrives. The store does not use them."""
TEXT_LISTS = kinds_of(GroupFacts, Texts)
"""The fields of a group that are lists of texts. Each has a table of its own."""
TURN_ARRAYS = kinds_of(Row, PerTurn)

_KEYS = {
    "groups": ("group_id",),
    "rows": ("group_id", "row"),
    "episodes": ("group_id", "episode"),
    **dict.fromkeys(TEXT_LISTS, ("group_id", "number")),
    "turns": ("group_id", "row", "turn"),
}
_MORE = {
    "groups": _columns({**_OF_STORE, "final_version": int, **_OF_GROUP}),
    "rows": _columns({
        "episode": int, "response_tokens": int, "context_tokens": int, "oldest_version": int, "newest_version": int,
        **kinds_of(Row, Scalar),
    }),
    "episodes": _columns({"reward": float, **kinds_of(EpisodeFacts, Scalar)}),
    **{name: {kind.column: "TEXT"} for name, kind in TEXT_LISTS.items()},
    "turns": {kind.column: "REAL" if "f" in kind.dtype else "INTEGER" for kind in TURN_ARRAYS.values()},
}  # fmt: skip
TABLES = {table: {**dict.fromkeys(keys, "INTEGER"), **_MORE[table]} for table, keys in _KEYS.items()}
"""[table][column] its SQL type."""
ARRIVED_TABLES = tuple(table for table in TABLES if table != "groups")
"""The tables that get their rows when a group arrives, and never later."""


def _create(table: str) -> str:
    columns = ", ".join(f"{name} {sql_type}" for name, sql_type in TABLES[table].items())
    storage = "" if table == "groups" else " WITHOUT ROWID"  # a group's error may be long
    return f"CREATE TABLE IF NOT EXISTS {table} ({columns}, PRIMARY KEY ({', '.join(_KEYS[table])})){storage};\n"


_DEFINITIONS = "".join(map(_create, TABLES)) + """
CREATE TABLE IF NOT EXISTS uses (group_id INTEGER, version INTEGER, PRIMARY KEY (group_id, version)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS payloads (group_id INTEGER PRIMARY KEY, file INTEGER, start INTEGER, bytes INTEGER);
CREATE TABLE IF NOT EXISTS streaks (position INTEGER PRIMARY KEY, streak INTEGER);
CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY, scalars TEXT);
CREATE VIEW IF NOT EXISTS trained AS
    SELECT uses.version + 1 AS step, uses.version - rows.oldest_version AS staleness, rows.*
    FROM uses JOIN rows USING (group_id);
CREATE VIEW IF NOT EXISTS errors AS
    SELECT group_id, data_row, episodes.end AS what, episodes.error FROM episodes JOIN groups USING (group_id)
    WHERE episodes.error <> ''
    UNION ALL
    SELECT group_id, data_row, 'left out', left_out.error FROM left_out JOIN groups USING (group_id)
    UNION ALL
    SELECT group_id, data_row, 'dropped', error FROM groups WHERE error <> '';
"""
SCHEMA_VERSION = zlib.crc32(f"{_DEFINITIONS} {StoreState().scalars()} {codec.SCHEMA_VERSION}".encode()) >> 1
"""Version of the journal: a checksum of its tables, of the scalars of an empty store and of the payloads' fields."""
SCHEMA = f"PRAGMA user_version = {SCHEMA_VERSION};\n{_DEFINITIONS}"


FILE_NAME = "trajectories.sqlite"
PAYLOADS_NAME = "{file_name}-payloads"
"""The folder of payload files, next to the journal."""
PAST_FILE_NAME = "trajectories.lineage_{lineage}.sqlite"
"""The name that a resume gives to the journal of the earlier run."""
FINAL = ("trained", "dropped")
_STORE_COLUMNS = (*ROW_COLUMNS, *Arrival._fields, "final_version")
_of_row, _of_arrived = attrgetter(*ROW_COLUMNS), attrgetter(*ARRIVED_COLUMNS)
_NO_ARRIVAL = (None,) * len(Arrival._fields)


def _write_groups(columns: Sequence[str]) -> str:
    """Return the SQL statement that writes these columns of one row of `groups`. Its other columns keep their values.
    """
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns if name != "group_id")
    return (
        f"INSERT INTO groups ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT (group_id) DO UPDATE SET {changes}"
    )

_WRITE_ROW, _WRITE_ARRIVED_ROW = _write_groups(_STORE_COLUMNS), _write_groups((*_STORE_COLUMNS, *ARRIVED_COLUMNS))


class Journal:
    """Writes the buffer's state to SQLite. The `record` methods collect changes, and `commit` writes them to disk.

    Every method raises AsyncRLError if the file can't be read or written. The constructor also does if another version
    of async-rl wrote the file.

    Args:
        keep_steps: after how many versions the payload of a trained or dropped group is deleted; -1: never.
    """

    def __init__(self, file: Path, keep_steps: int) -> None:
        self.file = file
        self._keep_steps = keep_steps
        self._rows: dict[int, StoredGroup] = {}
        self._arrived = ArrivedRows()
        self._facts: dict[int, GroupFacts] = {}  # [group_id] of groups that arrived since the last commit
        self._streaks: dict[int, int | None] = {}
        self._scalars: dict[str, Any] = {}
        with self._reporting_errors():
            file.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
            check_schema(self._db, file)
            self._db.execute("PRAGMA journal_mode = WAL")
            # Commits survive the death of the process; the last ones may be lost if the machine stops.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(SCHEMA)
            self._open_payloads()

    def load(self) -> tuple[list[StoredGroup], dict[str, Any], list[tuple[int, int]]] | None:
        """Return (rows of the live groups, the store's scalars, streaks of prompts), or None if nothing was committed.

        A live group was neither dropped nor trained on for the last time. A streak is (position of the question,
        streak).
        """
        with self._reporting_errors():
            found = self._db.execute("SELECT scalars FROM state").fetchone()
            if found is None:
                return None
            uses: dict[int, list[int]] = {}
            live = "state NOT IN ('trained', 'dropped')"
            for group_id, version in self._db.execute(
                f"SELECT group_id, version FROM uses JOIN groups USING (group_id) WHERE {live} ORDER BY version"
            ):
                uses.setdefault(group_id, []).append(version)
            rows = [
                row_of(values, tuple(uses.get(values["group_id"], ())), self._payload(values["group_id"]))
                for values in by_name(self._db).execute(f"SELECT * FROM groups WHERE {live}")
            ]
            streaks = self._db.execute("SELECT position, streak FROM streaks WHERE streak IS NOT NULL").fetchall()
        self._scalars = json.loads(found[0])
        return rows, self._scalars, streaks

    def copy_from(self, past: Path, statements: Iterable[str], numbers: Mapping[str, Any]) -> None:
        """Execute SQL statements that copy rows from the journal file `past` into this one.

        Args:
            statements: they refer to the tables of the other journal as `past.groups` and so on.
            numbers: the values of the named parameters of the statements.

        Raises:
            sqlite3.Error, OSError: one of the files can't be read or written.
        """
        self._db.execute("ATTACH ? AS past", (str(past),))
        self._db.execute("BEGIN")
        for statement in statements:
            self._db.execute(statement, numbers)
        self._db.execute("COMMIT")
        self._db.execute("DETACH past")
        self._open_payloads()

    def record(self, row: StoredGroup) -> None:
        self._rows[row.group_id] = row

    def record_group(self, group: GroupColumns) -> None:
        """Record for the next commit rows, turns and multi-turn episodes of an arrived group. Call `record` for it too.
        """
        self._arrived.add(group)
        self._facts[group.facts.group_id] = group.facts

    def record_streak(self, position: int, streak: int | None) -> None:
        """Record for the next commit the streak of the question at `position` (buffer/difficulty.py); None deletes it.
        """
        self._streaks[position] = streak

    def commit(self, scalars: dict[str, Any]) -> None:
        """Write everything recorded since the last commit and the store's `scalars`; delete payloads past `keep_steps`.
        """
        if not self._rows and scalars == self._scalars:
            return
        version = scalars["version"]
        rows = self._rows.values()
        fresh = [row for row in rows if row.payload and row.group_id not in self._kept]
        self._final.extend((version, row.group_id) for row in rows if row.state in FINAL and row.payload)
        pruned = []
        while self._keep_steps >= 0 and self._final and self._final[0][0] + self._keep_steps <= version:
            pruned.append((self._final.popleft()[1],))
        with self._reporting_errors():
            places = self._files.append([view(row.payload) for row in fresh])
            self._kept.update(zip((row.group_id for row in fresh), places, strict=True))
            self._db.execute("BEGIN")
            execute = self._db.executemany
            facts = self._facts
            execute(_WRITE_ROW, [_row_values(row, version) for row in rows if row.group_id not in facts])
            execute(_WRITE_ARRIVED_ROW, [
                (*_row_values(row, version), *_of_arrived(facts[row.group_id])) for row in rows if row.group_id in facts
            ])
            execute(
                "INSERT INTO payloads VALUES (?, ?, ?, ?)",
                [(row.group_id, *place) for row, place in zip(fresh, places, strict=True)],
            )
            self._arrived.insert(self._db)
            execute(
                "INSERT OR IGNORE INTO uses VALUES (?, ?)",
                [(row.group_id, used_in) for row in rows for used_in in row.trained_versions],
            )
            execute("DELETE FROM payloads WHERE group_id = ?", pruned)
            execute("REPLACE INTO streaks VALUES (?, ?)", list(self._streaks.items()))
            self._db.execute("REPLACE INTO state VALUES (0, ?)", (json.dumps(scalars),))
            self._db.execute("COMMIT")
            self._files.remove([self._kept.pop(group_id) for group_id, in pruned])
        self._rows.clear()
        self._arrived.clear()
        self._facts.clear()
        self._streaks.clear()
        self._scalars = scalars

    def close(self) -> None:
        """Merge the write-ahead log into the file and close it. Records that were not committed are lost."""
        with self._reporting_errors():
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._db.close()
            self._files.close()

    def _open_payloads(self) -> None:
        self._kept = {
            group_id: Place(*place)
            for group_id, *place in self._db.execute("SELECT group_id, file, start, bytes FROM payloads")
        }
        self._files = PayloadFiles(payload_folder(self.file), self._kept.values())
        self._final = deque(
            self._db.execute(
                "SELECT final_version, group_id FROM groups JOIN payloads USING (group_id) "
                "WHERE final_version IS NOT NULL ORDER BY final_version"
            )
        )

    def _payload(self, group_id: int) -> bytes:
        place = self._kept.get(group_id)
        return read_payload(payload_folder(self.file), place) if place else b""

    @contextlib.contextmanager
    def _reporting_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise AsyncRLError(
                f"the buffer's journal {self.file}: {error}. Free some disk there, or set buffer.journal=false"
            ) from None


def check_schema(database: sqlite3.Connection, file: Path) -> None:
    """Raise AsyncRLError if another version of this program wrote the journal `file`."""
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version != SCHEMA_VERSION and database.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise AsyncRLError(
            f"the journal {file} must have schema version {SCHEMA_VERSION}, got {version}: another version of async-rl "
            "wrote it. Use that one on this run, or begin a new run with another run.name"
        )


def payload_folder(file: Path) -> Path:
    return file.with_name(PAYLOADS_NAME.format(file_name=file.name))


def by_name(database: sqlite3.Connection) -> sqlite3.Cursor:
    """Return a cursor whose rows are indexed by column name."""
    cursor = database.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor


def _row_values(row: StoredGroup, version: int) -> tuple[Any, ...]:
    """Return the values of a group for _STORE_COLUMNS. If its state is final, `version` becomes its final_version."""
    return (*_of_row(row), *(row.arrival or _NO_ARRIVAL), version if row.state in FINAL else None)


def row_of(columns: sqlite3.Row, trained_versions: tuple[int, ...], payload: bytes) -> StoredGroup:
    has_arrived = columns["newest_version"] is not None
    arrival = Arrival(**{name: columns[name] for name in Arrival._fields}) if has_arrived else None
    of_row = {name: columns[name] for name in ROW_COLUMNS}
    return StoredGroup(**of_row, arrival=arrival, trained_versions=trained_versions, payload=payload)


_METRICS = {name for declared in (Row, EpisodeFacts) for name in kinds_of(declared, Metrics)}
_INSERT = {
    table: f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    for table, columns in TABLES.items()
}
_ORDER = {table: [name for name in columns if name != "group_id"] for table, columns in TABLES.items()}


class ArrivedRows:
    """Collects the rows of arrived groups for ARRIVED_TABLES, until `insert` writes them to the database."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in ARRIVED_TABLES}

    def add(self, group: GroupColumns) -> None:
        """Collect the rows of a group. `episodes` and `turns` get rows only if the group has episodes of several turns.
        """
        self._add("rows", group, _rows(group))
        for name, kind in TEXT_LISTS.items():
            if texts := getattr(group.facts, name):
                self._add(name, group, {"number": range(len(texts)), kind.column: texts})
        if group.episodes:
            numbers = range(len(group.episodes["rows"]))
            self._add("episodes", group, {**group.episodes, "episode": numbers, "reward": group.episode_rewards})
            self._add("turns", group, _turns(group))

    def insert(self, database: sqlite3.Connection) -> None:
        """Write all collected rows to the database. Rows that its tables already have are skipped."""
        for table, rows in self._rows.items():
            if rows:
                database.executemany(_INSERT[table], rows)

    def clear(self) -> None:
        for rows in self._rows.values():
            rows.clear()

    def _add(self, table: str, group: GroupColumns, columns: dict[str, Iterable[Any]]) -> None:
        """Collect rows of a group for one table.

        Args:
            columns: [column name] its values, one for each row; the column group_id is filled in here.
        """
        for name in _METRICS & columns.keys():
            columns[name] = map(json.dumps, columns[name])
        ordered = [columns[name] for name in _ORDER[table]]
        self._rows[table] += zip(itertools.repeat(group.facts.group_id), *ordered, strict=False)


def _rows(group: GroupColumns) -> dict[str, Iterable[Any]]:
    rows = group.episodes["rows"] if group.episodes else [1] * len(group.lengths)
    last_tokens = [end - 1 for end in group.ends]
    return {
        **group.rows,
        "row": itertools.count(),
        "episode": [number for number, num_rows in enumerate(rows) for _ in range(num_rows)],
        "response_tokens": group.trained_tokens,
        "context_tokens": [size - trained for size, trained in zip(group.lengths, group.trained_tokens, strict=True)],
        "oldest_version": group.oldest_versions(),
        "newest_version": group.rows["versions"][last_tokens].tolist(),
    }


def _turns(group: GroupColumns) -> dict[str, Iterable[Any]]:
    counts = [len(ends) for ends in group.rows["turn_ends"]]
    return {
        "row": [row for row, number in enumerate(counts) for _ in range(number)],
        "turn": itertools.chain.from_iterable(map(range, counts)),
        **{kind.column: itertools.chain.from_iterable(group.rows[name]) for name, kind in TURN_ARRAYS.items()},
    }
