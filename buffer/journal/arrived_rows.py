"""Makes the rows of groups that arrived, for the journal's tables of rollouts, episodes, errors and turns."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import Any

from async_rl.field_kinds import Metrics, kinds_of
from async_rl.messages.codec import GroupColumns
from async_rl.types import EpisodeFacts, GroupFacts, Rollout
from buffer.journal.tables import ARRIVED_COLUMNS, ARRIVED_TABLES, TABLES, TEXT_LISTS, TURN_ARRAYS

_METRICS = {name for declared in (GroupFacts, Rollout, EpisodeFacts) for name in kinds_of(declared, Metrics)}
_INSERT = {
    table: f"INSERT OR IGNORE INTO {table} ({', '.join(TABLES[table])}) VALUES ({', '.join('?' * len(TABLES[table]))})"
    for table in ARRIVED_TABLES
}
_UPDATE_GROUP = f"UPDATE groups SET {', '.join(f'{name} = ?' for name in ARRIVED_COLUMNS)} WHERE group_id = ?"
_of_group = attrgetter(*ARRIVED_COLUMNS, "group_id")


class ArrivedRows:
    """Collects the journal's rows of arrived groups, for ARRIVED_TABLES, until `insert` writes them."""

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in ARRIVED_TABLES}
        self._groups: list[GroupFacts] = []

    def add(self, group: GroupColumns) -> None:
        """Add the rows of a group. If its rollouts are answers to a question, it has none of episodes and turns."""
        self._groups.append(group.facts)
        self._add("rollouts", group, _rollouts(group))
        for name, kind in TEXT_LISTS.items():
            texts = getattr(group.facts, name)
            self._add(name, group, {"number": range(len(texts)), kind.column: texts})
        if group.episodes:
            numbers = range(len(group.episodes["rows"]))
            self._add("episodes", group, {**group.episodes, "episode": numbers, "reward": group.episode_rewards})
            self._add("turns", group, _turns(group))

    def insert(self, database: sqlite3.Connection) -> None:
        """Insert all rows but those that the tables have already, and fill ARRIVED_COLUMNS of the groups' rows."""
        for table, rows in self._rows.items():
            if rows:
                database.executemany(_INSERT[table], rows)
        database.executemany(_UPDATE_GROUP, map(_of_group, self._groups))

    def clear(self) -> None:
        self._groups.clear()
        for rows in self._rows.values():
            rows.clear()

    def _add(self, table: str, group: GroupColumns, columns: Mapping[str, Iterable[Any]]) -> None:
        """Add rows of a group to a table, given its columns by name, but for the group's id."""
        ordered = (
            map(json.dumps, columns[name]) if name in _METRICS else columns[name]
            for name in TABLES[table] if name != "group_id"
        )
        self._rows[table] += zip(itertools.repeat(group.facts.group_id), *ordered, strict=False)


def _rollouts(group: GroupColumns) -> dict[str, Iterable[Any]]:
    rows = group.episodes["rows"] if group.episodes else [1] * len(group.lengths)
    ends = [start + length - 1 for start, length in zip(group.starts, group.lengths, strict=True)]
    return {
        **group.rows,
        "rollout": itertools.count(),
        "episode": [number for number, num_rollouts in enumerate(rows) for _ in range(num_rollouts)],
        "response_tokens": group.trained_tokens,
        "context_tokens": [size - trained for size, trained in zip(group.lengths, group.trained_tokens, strict=True)],
        "oldest_version": group.oldest_versions(),
        "newest_version": group.rows["versions"][ends].tolist(),
    }


def _turns(group: GroupColumns) -> dict[str, Iterable[Any]]:
    counts = [len(ends) for ends in group.rows["turn_ends"]]
    return {
        "rollout": [rollout for rollout, number in enumerate(counts) for _ in range(number)],
        "turn": itertools.chain.from_iterable(map(range, counts)),
        **{kind.column: itertools.chain.from_iterable(group.rows[name]) for name, kind in TURN_ARRAYS.items()},
    }
