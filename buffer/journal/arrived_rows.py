"""Defines the journal's tables of the rollouts, episodes and turns of groups that arrived, and makes their rows."""

from __future__ import annotations

import itertools
import json
import sqlite3
from typing import Any

from async_rl.messages.codec import GroupColumns
from async_rl.messages.episode_columns import EpisodeColumns

TABLES = """
CREATE TABLE IF NOT EXISTS rollouts (
    group_id INTEGER, rollout INTEGER, episode INTEGER, reward REAL, response_tokens INTEGER, context_tokens INTEGER,
    oldest_version INTEGER, newest_version INTEGER, finish_reason TEXT, PRIMARY KEY (group_id, rollout)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS episodes (
    group_id INTEGER, episode INTEGER, reward REAL, turns INTEGER, tool_calls INTEGER, generate_s REAL, tool_s REAL,
    duration_s REAL, end TEXT, metrics TEXT, error TEXT, PRIMARY KEY (group_id, episode)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS left_out (
    group_id INTEGER, number INTEGER, error TEXT, PRIMARY KEY (group_id, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (
    group_id INTEGER, rollout INTEGER, turn INTEGER, end_token INTEGER, reward REAL,
    PRIMARY KEY (group_id, rollout, turn)
) WITHOUT ROWID;
"""
TABLE_NAMES = ("rollouts", "episodes", "left_out", "turns")
_NUM_COLUMNS = (9, 11, 3, 5)


class ArrivedRows:
    """Collects the journal's rows of arrived groups, for the tables TABLE_NAMES, until `insert` writes them."""

    def __init__(self) -> None:
        self._rows: tuple[list[tuple[Any, ...]], ...] = ([], [], [], [])

    def add(self, group: GroupColumns) -> None:
        """Add the rows of a group. If its rollouts are answers to a question, it has rows in `rollouts` only."""
        rollouts, episodes, left_out, turns = self._rows
        ends = [start + length - 1 for start, length in zip(group.starts, group.lengths, strict=True)]
        context_tokens = [length - trained for length, trained in zip(group.lengths, group.trained_tokens, strict=True)]
        rollouts += zip(
            itertools.repeat(group.group_id), itertools.count(), _episode_numbers(group), group.rewards,
            group.trained_tokens, context_tokens, group.oldest_versions(), group.versions[ends].tolist(),
            group.finish_reasons, strict=False,
        )
        left_out += ((group.group_id, number, error) for number, error in enumerate(group.left_out))
        if group.episodes:
            episodes += _episode_rows(group.group_id, group.episodes, group.episode_rewards)
            of_rollouts = zip(group.episodes.turn_ends, group.episodes.turn_rewards, strict=True)
            turns += (
                (group.group_id, rollout, turn, end, reward)
                for rollout, of_rollout in enumerate(of_rollouts)
                for turn, (end, reward) in enumerate(zip(*of_rollout, strict=True))
            )

    def insert(self, database: sqlite3.Connection) -> None:
        """Insert all rows. Those of a group that the tables have already are left out."""
        for table, num_columns, rows in zip(TABLE_NAMES, _NUM_COLUMNS, self._rows, strict=True):
            if rows:
                marks = ", ".join("?" * num_columns)
                database.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", rows)

    def clear(self) -> None:
        for rows in self._rows:
            rows.clear()


def _episode_numbers(group: GroupColumns) -> list[int]:
    """Return the number of the episode to which each rollout belongs."""
    rows = [facts.rows for facts in group.episodes.facts] if group.episodes else [1] * len(group.lengths)
    return [number for number, num_rollouts in enumerate(rows) for _ in range(num_rollouts)]


def _episode_rows(group_id: int, episodes: EpisodeColumns, rewards: list[float]) -> list[tuple[Any, ...]]:
    return [
        (
            group_id, number, reward, facts.turns, facts.tool_calls, facts.generate_s, facts.tool_s,
            facts.duration_s, facts.end, json.dumps(facts.metrics), facts.error,
        )
        for number, (facts, reward) in enumerate(zip(episodes.facts, rewards, strict=True))
    ]  # fmt: skip
