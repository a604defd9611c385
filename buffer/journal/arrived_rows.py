"""Makes what the journal's tables hold of groups that arrived: of their rows, episodes, errors and turns."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterable
from typing import Any

from async_rl.field_kinds import Metrics, kinds_of
from async_rl.messages.codec import GroupColumns
from async_rl.types import EpisodeFacts, Row
from buffer.journal.tables import ARRIVED_TABLES, TABLES, TEXT_LISTS, TURN_ARRAYS

_METRICS = {name for declared in (Row, EpisodeFacts) for name in kinds_of(declared, Metrics)}
_INSERT = {
    table: f"INSERT OR IGNORE INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    for table, columns in TABLES.items()
}
_ORDER = {table: [name for name in columns if name != "group_id"] for table, columns in TABLES.items()}


class ArrivedRows:
    """Collects the journal's rows of arrived groups, for ARRIVED_TABLES, until `insert` writes them."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in ARRIVED_TABLES}

    def add(self, group: GroupColumns) -> None:
        """Add the rows of a group. If its rows are answers to a question, it has none of episodes and turns."""
        self._add("rows", group, _rows(group))
        for name, kind in TEXT_LISTS.items():
            if texts := getattr(group.facts, name):
                self._add(name, group, {"number": range(len(texts)), kind.column: texts})
        if group.episodes:
            numbers = range(len(group.episodes["rows"]))
            self._add("episodes", group, {**group.episodes, "episode": numbers, "reward": group.episode_rewards})
            self._add("turns", group, _turns(group))

    def insert(self, database: sqlite3.Connection) -> None:
        """Insert all rows. Those of a group that the tables have already are left out."""
        for table, rows in self._rows.items():
            if rows:
                database.executemany(_INSERT[table], rows)

    def clear(self) -> None:
        for rows in self._rows.values():
            rows.clear()

    def _add(self, table: str, group: GroupColumns, columns: dict[str, Iterable[Any]]) -> None:
        """Add rows of a group to a table, given its columns by name, but for the group's id."""
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
