"""Reads rows of Parquet and JSONL files, and of data sets of the hub, as dicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.storage.hub_data import data_files
from async_rl.storage.hub_names import find_data

CheckColumns = Callable[[Collection[str], str], None]
"""Raises ConfigError, given the columns of a Parquet file or of one row and where that is, if some are missing."""


def read_rows(
    path: str, key: str, columns: Sequence[str], check_columns: CheckColumns
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the rows of `path`, the value of the setting `key`, and the names of all columns that the files have.

    Args:
        path: a .parquet or .jsonl file, or a data set of the hub, whose files are read one after the other.
        columns: the columns that are read of a Parquet file.

    Raises:
        ConfigError: there is no such file, it can't be read, or it lacks columns.
    """
    repo = find_data(path, key)
    parts = [_rows(file, key, columns, check_columns) for file in (data_files(repo) if repo else [Path(path)])]
    return [row for rows, _ in parts for row in rows], {name for _, names in parts for name in names}


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of each line that is not blank.

    A line ends at a line feed only: str.splitlines would also cut at U+2028, U+0085 and others inside JSON strings.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise ConfigError(
                        f"{path}, line {number}: must be UTF-8, got {line[error.start : error.start + 8]!r} at byte "
                        f"{error.start}. Convert the file: iconv -f <its encoding> -t utf-8"
                    ) from None
                if text.strip():
                    yield number, text
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None


def _rows(
    path: Path, key: str, wanted: Sequence[str], check_columns: CheckColumns
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return the rows of a .parquet or .jsonl file as {column: value}, and the names of all its columns."""
    if not path.is_file():
        raise ConfigError(f"{key} must be a file, got {path}: there is no such file")
    if path.suffix == ".parquet":
        return _parquet_rows(path, wanted, check_columns)
    if path.suffix != ".jsonl":
        raise ConfigError(f"{key} must end in .parquet or .jsonl, got {path}")
    rows: list[dict[str, Any]] = []
    for number, line in numbered_lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: must be a JSON object, got {line[:80]!r}")
        check_columns(row, f"{path}, line {number}")
        rows.append(row)
    return rows, {name for row in rows for name in row}


def _parquet_rows(
    path: Path, wanted: Sequence[str], check_columns: CheckColumns
) -> tuple[list[dict[str, Any]], set[str]]:
    import pyarrow
    import pyarrow.parquet

    try:
        columns = pyarrow.parquet.read_schema(path).names
        check_columns(columns, str(path))
        table = pyarrow.parquet.read_table(path, columns=[name for name in wanted if name in columns])
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path} can't be read as Parquet: {error}") from error
    return table.to_pylist(), set(columns)
