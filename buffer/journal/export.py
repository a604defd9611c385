"""`async-rl export-trajectories`: writes a run's journal to one Parquet file with a row for each rollout."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from async_rl.errors import ConfigError
from async_rl.messages.codec import decode_group
from async_rl.messages.limits import Limits
from buffer.journal.journal import FILE_NAME, check_schema, payload_folder
from buffer.journal.payload_files import Place, read_payload

GROUPS_A_CHUNK = 128

SCHEMA = pa.schema(
    {
        "group_id": pa.int64(), "rollout": pa.int32(), "prompt_index": pa.int64(), "data_row": pa.int64(),
        "worker": pa.string(), "state": pa.string(), "drop_reason": pa.string(), "start_version": pa.int32(),
        "finished_version": pa.int32(),
        "oldest_version": pa.int32(), "newest_version": pa.int32(), "trained_steps": pa.list_(pa.int32()),
        "staleness": pa.int32(), "reward": pa.float64(), "response_tokens": pa.int32(), "context_tokens": pa.int32(),
        "finish_reason": pa.string(), "episode": pa.int32(), "turns": pa.int32(), "tool_calls": pa.int32(),
        "generate_s": pa.float64(), "tool_s": pa.float64(), "duration_s": pa.float64(), "end": pa.string(),
        "metrics": pa.string(), "error": pa.string(), "left_out": pa.list_(pa.string()),
        "turn_ends": pa.list_(pa.int32()), "turn_rewards": pa.list_(pa.float64()),
        "prompt_tokens": pa.list_(pa.int32()), "tokens": pa.list_(pa.int32()), "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()), "mask": pa.list_(pa.bool_()),
    }
)
"""The columns of the file. `staleness` is that of the last use. `left_out` has the errors of those
episodes of the group that have no rollout. The other columns from `turns` to `turn_rewards` are null for an answer to a
question. Those from `prompt_tokens` on are null if the journal has removed the group's payload."""
TEXT_SCHEMA = pa.schema({"prompt_text": pa.string(), "answer_text": pa.string(), "ground_truth": pa.string()})
"""The columns that `add_texts` fills."""

_ROLLOUTS = """
SELECT group_id, rollout, prompt_index, data_row, worker, state, drop_reason, start_version, finished_version,
    oldest_version, rollouts.newest_version AS newest_version, rollouts.reward AS reward,
    rollouts.response_tokens AS response_tokens, context_tokens, finish_reason, episode, turns, tool_calls,
    generate_s, tool_s, episodes.duration_s AS duration_s, end, metrics, episodes.error AS error,
    (SELECT json_group_array(version + 1) FROM uses WHERE uses.group_id = rollouts.group_id) AS trained_steps,
    (SELECT MAX(version) FROM uses WHERE uses.group_id = rollouts.group_id) - oldest_version AS staleness
FROM rollouts JOIN groups USING (group_id) LEFT JOIN episodes USING (group_id, episode) ORDER BY group_id, rollout
"""
_LEFT_OUT = "SELECT error FROM left_out WHERE group_id = ? ORDER BY number"
_TURNS = "SELECT rollout, end_token, reward FROM turns WHERE group_id = ? ORDER BY rollout, turn"


def export_trajectories(
    run_dir: Path, target: Path, add_texts: Callable[[dict[str, Any]], None] | None = None
) -> int:
    """Write every rollout that arrived, before a resume too, to the Parquet file `target`; return their number.

    The run may still be going on. `add_texts` is called with each row, to fill in the columns of TEXT_SCHEMA; without
    it the file does not have them.
    Raises ConfigError if the journal is missing or empty, or if the file can't be written.
    """
    if target.suffix != ".parquet":
        raise ConfigError(f"OUT.parquet must end with .parquet, got {target}: no other format is written")
    journal = run_dir / FILE_NAME
    if not journal.is_file():
        raise ConfigError(f"{journal} does not exist: not a run directory, or a run with buffer.journal=false")
    number = 0
    try:
        with closing(sqlite3.connect(journal)) as database:
            check_schema(database, journal)
            database.execute("BEGIN")  # all queries see the same moment of a run that is going on
            if database.execute("SELECT scalars FROM state").fetchone() is None:
                raise ConfigError(
                    f"{journal} must hold what a buffer committed, got an empty journal: no rollout group was ever "
                    f"asked for. The logs in {run_dir / 'logs'} may say why; if the run is starting, try again later"
                )
            schema = pa.schema([*SCHEMA, *TEXT_SCHEMA]) if add_texts else SCHEMA
            with pq.ParquetWriter(target, schema) as writer:
                for chunk in _chunks(database, payload_folder(journal)):
                    if add_texts:
                        for row in chunk:
                            add_texts(row)
                    writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema))
                    number += len(chunk)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{journal} can't be exported to {target}: {error}") from None
    return number


def _chunks(database: sqlite3.Connection, folder: Path) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of the Parquet file, one per rollout, in lists of GROUPS_A_CHUNK whole groups."""
    cursor = database.execute(_ROLLOUTS)
    names = [column[0] for column in cursor.description]
    chunk: list[dict[str, Any]] = []
    every_row = (dict(zip(names, values, strict=True)) for values in cursor)
    for number, (group_id, of_group) in enumerate(groupby(every_row, itemgetter("group_id")), 1):
        rows = list(of_group)
        if rows[0]["turns"]:
            _add_turns(rows, database.execute(_TURNS, (group_id,)).fetchall())
        place = database.execute("SELECT file, start, bytes FROM payloads WHERE group_id = ?", (group_id,)).fetchone()
        if place:
            with suppress(FileNotFoundError):  # the journal has removed the file since
                _add_arrays(rows, read_payload(folder, Place(*place)))
        left_out = [error for (error,) in database.execute(_LEFT_OUT, (group_id,))]
        for row in rows:
            row["left_out"] = left_out
            row["trained_steps"] = json.loads(row["trained_steps"])
        chunk += rows
        if number % GROUPS_A_CHUNK == 0:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _add_turns(rows: list[dict[str, Any]], turns: list[tuple[int, int, float]]) -> None:
    """Add `turn_ends` and `turn_rewards` to the rows of a group, given (rollout, end, reward) of all its turns."""
    for row in rows:
        of_row = [(end, reward) for rollout, end, reward in turns if rollout == row["rollout"]]
        row["turn_ends"], row["turn_rewards"] = (list(column) for column in zip(*of_row, strict=True))


def _add_arrays(rows: list[dict[str, Any]], payload: bytes) -> None:
    """Add the arrays (tokens, logprobs, versions, mask) of an encoded group to its rows."""
    group = decode_group(payload, Limits.of_stored(payload, rows[-1]["episode"] + 1))
    for row, rollout in zip(rows, group.rollouts, strict=True):
        row |= {
            "prompt_tokens": group.prompt_tokens, "tokens": rollout.tokens, "logprobs": rollout.logprobs,
            "versions": rollout.versions, "mask": rollout.mask,
        }
