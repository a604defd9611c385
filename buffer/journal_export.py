"""`async-rl export-trajectories`: writes a run's journal to a Parquet file with a line for each row."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from async_rl.base.errors import ConfigError, WireError
from async_rl.base.messages.codec import decode_group
from async_rl.base.messages.fields import Limits
from async_rl.base.types import GroupFacts, PerPromptToken, PerToken, Row, Scalar, kinds_of
from buffer.journal import FILE_NAME, TABLES, TEXT_LISTS, TURN_ARRAYS, Place, check_schema, payload_folder, read_payload

GROUPS_A_CHUNK = 128

_STATE_COLUMNS = ("state", "drop_reason", "finished_version")
_TABLE_OF = {
    **dict.fromkeys((*kinds_of(GroupFacts, Scalar), *_STATE_COLUMNS), "groups"),
    **dict.fromkeys(TABLES["episodes"], "episodes"),
    **dict.fromkeys(TABLES["rows"], "rows"),
}
"""The table that each column comes from. If several tables have the column, `rows` is chosen first, then `episodes`."""
_TOKEN_ARRAYS = kinds_of(Row, PerToken)
_PROMPT_ARRAYS = kinds_of(GroupFacts, PerPromptToken)
_ARROW_TYPES = {"INTEGER": pa.int64(), "REAL": pa.float64(), "TEXT": pa.string()}
SCHEMA = pa.schema(
    {
        **{name: _ARROW_TYPES[TABLES[table][name]] for name, table in _TABLE_OF.items()},
        "trained_steps": pa.list_(pa.int32()),
        "staleness": pa.int32(),
        **dict.fromkeys(TEXT_LISTS, pa.list_(pa.string())),
        **{
            name: pa.list_(pa.from_numpy_dtype(np.dtype(kind.dtype)))
            for name, kind in {**TURN_ARRAYS, **_PROMPT_ARRAYS, **_TOKEN_ARRAYS}.items()
        },
    }
)
"""The columns of the file. `staleness` is the staleness at the last use. `left_out` has the errors of the episodes
without a row. Columns of episodes and turns are null for an answer to a question. Columns of tokens are null if the
payload of the group was deleted or is damaged."""
TEXT_SCHEMA = pa.schema({"prompt_text": pa.string(), "response_text": pa.string(), "ground_truth": pa.string()})
"""The columns that `add_texts` fills."""

_ROWS = f"""
SELECT {", ".join(f"{table}.{name} AS {name}" for name, table in _TABLE_OF.items())},
    (SELECT json_group_array(version + 1) FROM uses WHERE uses.group_id = rows.group_id) AS trained_steps,
    (SELECT MAX(version) FROM uses WHERE uses.group_id = rows.group_id) - oldest_version AS staleness
FROM rows JOIN groups USING (group_id) LEFT JOIN episodes USING (group_id, episode)
ORDER BY rows.group_id, rows.row
"""
_TURNS = f"""
SELECT row, {", ".join(f"{kind.column} AS {name}" for name, kind in TURN_ARRAYS.items())}
FROM turns WHERE group_id = ? ORDER BY row, turn
"""


class Exported(NamedTuple):
    """The result of an export: the number of rows written, and the groups whose tokens could not be read."""

    num_rows: int
    damages: list[str]
    """Text for each group with a damaged payload: its id and what is wrong."""


def export_trajectories(
    run_dir: Path, target: Path, add_texts: Callable[[dict[str, Any]], None] | None = None
) -> Exported:
    """Write every row that arrived, also before a resume, to the Parquet file `target`. The run may still be going on.

    Args:
        add_texts: called with each row to fill in the columns of TEXT_SCHEMA; None: the file lacks these columns.

    Raises ConfigError if the journal is missing or empty, or if the file can't be written.
    """
    if target.suffix != ".parquet":
        raise ConfigError(f"OUT.parquet must end with .parquet, got {target}: no other format is written")
    journal = run_dir / FILE_NAME
    if not journal.is_file():
        raise ConfigError(f"{journal} does not exist: not a run directory, or a run with buffer.journal=false")
    number, damages = 0, list[str]()
    try:
        with closing(sqlite3.connect(journal)) as database:
            check_schema(database, journal)
            database.execute("BEGIN")  # all queries see the same moment of a run that is going on
            if database.execute("SELECT scalars FROM state").fetchone() is None:
                raise ConfigError(
                    f"{journal} must hold what a buffer committed, got an empty journal: no group was ever "
                    f"asked for. The logs in {run_dir / 'logs'} may say why; if the run is starting, try again later"
                )
            schema = pa.schema([*SCHEMA, *TEXT_SCHEMA]) if add_texts else SCHEMA
            with pq.ParquetWriter(target, schema) as writer:
                for chunk in _chunks(database, payload_folder(journal), damages):
                    if add_texts:
                        for row in chunk:
                            add_texts(row)
                    writer.write_batch(pa.RecordBatch.from_pylist(chunk, schema))
                    number += len(chunk)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"{journal} can't be exported to {target}: {error}") from None
    return Exported(number, damages)


def _chunks(database: sqlite3.Connection, folder: Path, damages: list[str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of the Parquet file, one per row, in lists with all rows of GROUPS_A_CHUNK groups.

    A message for each group with a damaged payload is added to `damages`.
    """
    cursor = database.execute(_ROWS)
    names = [column[0] for column in cursor.description]
    chunk: list[dict[str, Any]] = []
    every_row = (dict(zip(names, values, strict=True)) for values in cursor)
    for number, (group_id, of_group) in enumerate(groupby(every_row, itemgetter("group_id")), 1):
        rows = list(of_group)
        if rows[0]["turns"]:
            _add_turns(rows, database.execute(_TURNS, (group_id,)).fetchall())
        place = database.execute("SELECT file, start, bytes FROM payloads WHERE group_id = ?", (group_id,)).fetchone()
        if place and (damage := _add_tokens(rows, folder, Place(*place))):
            damages.append(f"group {group_id}: {damage}")
        texts = {name: _texts(database, name, kind.column, group_id) for name, kind in TEXT_LISTS.items()}
        for row in rows:
            row |= texts
            row["trained_steps"] = json.loads(row["trained_steps"])
        chunk += rows
        if number % GROUPS_A_CHUNK == 0:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _texts(database: sqlite3.Connection, table: str, column: str, group_id: int) -> list[str]:
    query = f"SELECT {column} FROM {table} WHERE group_id = ? ORDER BY number"
    return [text for (text,) in database.execute(query, (group_id,))]


def _add_turns(rows: list[dict[str, Any]], turns: list[tuple[Any, ...]]) -> None:
    """Add the arrays of turns to the rows of one group. `turns` has (row number, a value for each array) per turn."""
    for row in rows:
        of_row = [values for number, *values in turns if number == row["row"]]
        row |= zip(TURN_ARRAYS, map(list, zip(*of_row, strict=True)), strict=True)


def _add_tokens(rows: list[dict[str, Any]], folder: Path, place: Place) -> str:
    """Add the arrays of tokens to the rows of one group. Returns how its payload is damaged, "" if it is not.

    Adds nothing if the journal has deleted the payload.
    """
    try:
        _add_arrays(rows, read_payload(folder, place))
    except FileNotFoundError:  # the journal has removed the file since
        return ""
    except (OSError, WireError) as error:
        return str(error)
    return ""


def _add_arrays(rows: list[dict[str, Any]], payload: bytes) -> None:
    """Add the token arrays of an encoded group to its rows: tokens, logprobs, versions, mask, and the prompt's tokens.
    """
    group = decode_group(payload, Limits.of_stored(payload, rows[-1]["episode"] + 1))
    of_group = {name: getattr(group, name) for name in _PROMPT_ARRAYS}
    for record, row in zip(rows, group.rows, strict=True):
        record |= of_group | {name: getattr(row, name) for name in _TOKEN_ARRAYS}
