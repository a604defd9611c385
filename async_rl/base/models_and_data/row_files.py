"""Reads the rows of a source: files, a glob, a folder saved by `datasets`, or a data set of the hub.

JSON is read line by line and not by `datasets`, which turns the text "2024-05-01" into a date and a long integer into a
float. The values of CSV are text.
"""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.hub import data_files
from async_rl.base.models_and_data.hub_names import DATA_SUFFIXES, SCHEME, find_data

Choose = Callable[[Sequence[str]], Sequence[str]]
"""A function from the columns of a file to those that are read."""


CheckColumns = Callable[[Collection[str], str], None]
"""Raises ConfigError if columns are missing. Its arguments are the columns of a file or a row, and where that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one file or of a saved folder."""

    columns: tuple[str, ...]
    """The names of all columns of the file."""
    rows: list[dict[str, Any]]
    """The rows, with the chosen columns or all of them."""


def files_of(path: str, key: str) -> list[Path]:
    """Return the files and saved folders of a source, in order. A data set of the hub is downloaded first.

    Args:
        path: a value of the setting `key`.

    Raises:
        ConfigError: there are no files, or `path` is malformed.
    """
    if repo := find_data(path, key):
        return data_files(repo)
    is_pattern = glob.has_magic(path) and not Path(path).exists()
    files = sorted(map(Path, glob.glob(path, recursive=True))) if is_pattern else [Path(path)]
    for file in files:
        if not file.is_dir() and file.suffix not in DATA_SUFFIXES and file.exists():
            raise ConfigError(f"{key} must name files that end in {', '.join(DATA_SUFFIXES)}, got {file}")
    if not files or not all(file.exists() for file in files):
        raise ConfigError(f"{key} {path}: there is no such file. A data set of the hub is named {SCHEME}OWNER/NAME")
    return files


def rows_of(path: Path, choose: Choose) -> Rows:
    """Return the rows of a file or a saved folder. If it has a schema, only the columns that `choose` returns are read.

    Raises:
        ConfigError: the file can't be read.
    """
    import pyarrow

    try:
        if path.is_dir() or path.suffix == ".arrow":
            return _saved_rows(path, choose)
        if path.suffix == ".parquet":
            return _parquet_rows(path, choose)
        rows = _csv_rows(path) if path.suffix == ".csv" else _json_rows(path)
        return Rows(columns=tuple(dict.fromkeys(name for row in rows for name in row)), rows=rows)
    except ConfigError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, csv.Error) as error:
        hint = f". Name the files of another folder, as in {path}/*.parquet" if path.is_dir() else ""
        raise ConfigError(f"{path} can't be read: {error}{hint}") from error


def read_rows(path: str, key: str, columns: Sequence[str], check_columns: CheckColumns) -> list[dict[str, Any]]:
    """Return all rows of a source. From files with a schema only the given columns are read.

    Args:
        path: the source, the value of the setting `key`.

    Raises:
        ConfigError: there is no such file, it can't be read, or `check_columns` refuses its columns or a row's.
    """
    rows: list[dict[str, Any]] = []
    for file in files_of(path, key):

        def choose(names: Sequence[str], file: Path = file) -> list[str]:
            check_columns(names, str(file))
            return [name for name in columns if name in names]

        found = rows_of(file, choose).rows
        for number, row in enumerate(found, start=len(rows)):
            check_columns(row, f"{path}, row {number}")
        rows += found
    return rows


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text) of each line that is not blank.

    Only a line feed ends a line: str.splitlines would also cut at U+2028, U+0085 and others inside JSON strings.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    text = line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise ConfigError(f"{path}, line {number}: must be UTF-8: {error}") from None
                if text.strip():
                    yield number, text
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None


def _parquet_rows(path: Path, choose: Choose) -> Rows:
    import pyarrow.parquet

    names = pyarrow.parquet.read_schema(path).names
    table = pyarrow.parquet.read_table(path, columns=list(choose(names)))
    return Rows(columns=tuple(names), rows=table.to_pylist())


def _saved_rows(path: Path, choose: Choose) -> Rows:
    """Return the rows of an Arrow file, or of a folder written by Dataset.save_to_disk."""
    from datasets import Dataset, DatasetDict, load_from_disk

    data = load_from_disk(path) if path.is_dir() else Dataset.from_file(str(path))
    if isinstance(data, DatasetDict):
        raise ConfigError(f"{path} has several splits: name one, {' or '.join(f'{path}/{split}' for split in data)}")
    table = data.select_columns(list(choose(data.column_names))).with_format("arrow")[:]
    return Rows(columns=tuple(data.column_names), rows=table.to_pylist())


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file, strict=True))


def _json_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file with JSON lines. A file that ends in .json may be one list of objects instead."""
    if path.suffix == ".json" and (text := path.read_text(encoding="utf-8")).lstrip().startswith("["):
        rows = [(f"row {number}", row) for number, row in enumerate(_parsed(text, str(path)))]
    else:
        rows = [
            (f"line {number}", _parsed(line, f"{path}, line {number}")) for number, line in numbered_lines(path)
        ]
    for where, row in rows:
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, {where}: must be a JSON object, got {str(row)[:80]!r}")
    return [row for _, row in rows]


def _parsed(text: str, where: str) -> Any:
    """Parse a JSON text. Raises ConfigError if it is invalid, or an escape in it stands for half a character."""
    try:
        found = json.loads(text)
        if "\\u" in text:  # only an escape can stand for half of a character
            json.dumps(found, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    return found
