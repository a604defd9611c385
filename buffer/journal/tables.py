"""Defines the journal's tables. Their columns follow from the fields declared in base/types.py and stored_group.py.

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

Users may read the tables too, also while the run goes on: see "Trajectories in SQL" in the documentation.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, get_type_hints

from async_rl.base.messages import codec
from async_rl.base.types import EpisodeFacts, Flag, GroupFacts, Number, PerTurn, Row, Scalar, Texts, Whole, kinds_of
from buffer.store_state import StoreState
from buffer.stored_group import Arrival, StoredGroup

_SQL_TYPES: dict[type, str] = {
    **dict.fromkeys((int, bool, Whole, Flag), "INTEGER"), **dict.fromkeys((float, Number), "REAL"),
}
"""The SQL type of a Python type or of a kind of field; of all others it is TEXT."""


def _columns(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the SQL types of fields, whose values here are kinds or Python types."""
    return {
        name: _SQL_TYPES.get(of if isinstance(of, type) else type(of), "TEXT") for name, of in fields.items()
    }


ROW_COLUMNS = tuple(name for name in StoredGroup._fields if name not in ("arrival", "trained_versions", "payload"))
_OF_STORE = {name: get_type_hints(StoredGroup)[name] for name in ROW_COLUMNS} | get_type_hints(Arrival)
_OF_GROUP = kinds_of(GroupFacts, Scalar)
ARRIVED_COLUMNS = tuple(name for name in _OF_GROUP if name not in _OF_STORE)
"""The columns of `groups` that are written when a group arrives; the store has no use for them."""
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
"""The tables whose rows are written once, when a group arrives."""


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

