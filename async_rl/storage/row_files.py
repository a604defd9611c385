"""Reads the rows of a source of prompts: Parquet, JSONL or Arrow files, a glob of these, a folder, or the hub."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.errors import ConfigError
from async_rl.storage.hub_data import data_files
from async_rl.storage.hub_names import data_hint, find_data

SUFFIXES = (".parquet", ".jsonl", ".arrow")
STATE, SPLITS = "state.json", "dataset_dict.json"
"""The files by which `datasets.save_to_disk` marks the folder of a data set, and that of several splits."""

Choose = Callable[[Sequence[str]], Sequence[str]]
"""Returns which of the columns that it gets are to be read."""


CheckColumns = Callable[[Collection[str], str], None]
"""Raises ConfigError, given the columns of a file or of one row and where that is, if some are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of one file."""

    path: Path
    columns: tuple[str, ...]
    """The names of all columns that the file has."""
    rows: list[dict[str, Any]]
    """With the columns that were chosen, or all of them."""


def files_of(path: str, key: str) -> list[Path]:
    """Return the files of a source, in order; those of a data set of the hub are downloaded first.

    Raises:
        ConfigError: there are none, or `path`, a value of the setting `key`, has none of the allowed forms.
    """
    if repo := find_data(path, key):
        return data_files(repo)
    files = [file for each in _named(path, key) for file in (_files_of_folder(each, key) if each.is_dir() else [each])]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{key} must name files, got {file}: there is no such file{data_hint(path)}")
        if file.suffix not in SUFFIXES:
            raise ConfigError(f"{key} must end in .parquet, .jsonl or .arrow, got {file}")
    return files


def local_files(path: str, key: str) -> list[Path]:
    """Return all files from which `files_of` reads a local source, also those that mark a folder of save_to_disk."""
    folders = [each / STATE for each in _named(path, key) if each.is_dir()]
    return sorted({*folders, *files_of(path, key)})


def is_pattern(path: str) -> bool:
    """Return whether `path` is a glob, and not the name of a file or folder that exists."""
    return glob.has_magic(path) and not Path(path).exists()


def rows_of(path: Path, choose: Choose) -> Rows:
    """Return the rows of a file; of one with a schema only the columns that `choose` returns are read.

    Raises:
        ConfigError: the file can't be read.
    """
    return _jsonl_rows(path) if path.suffix == ".jsonl" else _table_rows(path, choose)


def read_rows(path: str, key: str, columns: Sequence[str], check_columns: CheckColumns) -> list[dict[str, Any]]:
    """Return the rows of a source, the value of the setting `key`; of files with a schema only these columns are read.

    Raises:
        ConfigError: there is no such file, it can't be read, or `check_columns` refuses its columns or those of a row.
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


def _named(path: str, key: str) -> list[Path]:
    """Return the files and folders that a source names; raises ConfigError if a glob, the value of `key`, has none."""
    if not is_pattern(path):
        return [Path(path)]
    found = sorted(map(Path, glob.glob(path, recursive=True)))
    if not found:
        raise ConfigError(f"{key} {path}: no file has such a name{data_hint(path)}")
    return found


def _files_of_folder(folder: Path, key: str) -> list[Path]:
    """Return the Arrow files of a folder that datasets.save_to_disk has written."""
    if (folder / SPLITS).is_file():
        splits = [str(folder / name) for name in _saved(folder / SPLITS, "splits", key)["splits"]]
        raise ConfigError(f"{key} {folder} has several splits: name one, {' or '.join(splits)}")
    if not (folder / STATE).is_file():
        raise ConfigError(
            f"{key} {folder} is a folder that datasets.save_to_disk has not written: it has no {STATE}. "
            f"{_what_it_holds(folder)}"
        )
    state = _saved(folder / STATE, "_data_files", key)
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise ConfigError(f"{key} {folder} holds a selection of rows: call flatten_indices() before save_to_disk")
    return [folder / each["filename"] for each in state["_data_files"]]


def _saved(file: Path, name: str, key: str) -> dict[str, Any]:
    """Return what is in a file of datasets.save_to_disk, with a list under `name`.

    Raises:
        ConfigError: the file is cut short, or another program wrote it.
    """
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        content = f"no JSON ({error})"
    if not isinstance(content, dict) or not isinstance(content.get(name), list):
        raise ConfigError(
            f"{key}: {file} must be as datasets.save_to_disk writes it, with a list {name}, got {str(content)[:120]}. "
            "Save the data set again, or name its files"
        )
    return content


def _what_it_holds(folder: Path) -> str:
    """Return how to name the files of a folder, for people: those in it, else those in the folders in it."""
    for pattern in ("*", "*/*"):
        endings = {each.suffix for each in folder.glob(pattern) if each.suffix in SUFFIXES}
        if endings:
            return f"Name its files: {' or '.join(f'{folder}/{pattern}{each}' for each in sorted(endings))}"
    return f"It holds no file that ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


def _jsonl_rows(path: Path) -> Rows:
    rows: list[dict[str, Any]] = []
    columns: dict[str, None] = {}
    for number, line in numbered_lines(path):
        try:
            row = json.loads(line)
            if "\\u" in line:  # only an escape can stand for half of a character
                json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{path}, line {number}: must have whole characters, got {error.object[error.start]!a}, half of a "
                "surrogate pair. Something has cut the text there: write it whole, or leave the row out"
            ) from None
        except RecursionError:
            raise ConfigError(f"{path}, line {number}: must not be nested so deeply, got {line[:80]!r}") from None
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: must be a JSON object, got {line[:80]!r}")
        columns |= dict.fromkeys(row)
        rows.append(row)
    return Rows(path=path, columns=tuple(columns), rows=rows)


def _table_rows(path: Path, choose: Choose) -> Rows:
    import pyarrow
    import pyarrow.parquet

    is_parquet = path.suffix == ".parquet"
    try:
        if is_parquet:
            names = pyarrow.parquet.read_schema(path).names
            table = pyarrow.parquet.read_table(path, columns=list(choose(names)))
        else:
            with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
                names = stream.schema.names
                table = stream.read_all().select(list(choose(names)))
        return Rows(path=path, columns=tuple(names), rows=table.to_pylist())
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = "Parquet" if is_parquet else "an Arrow stream"
        raise ConfigError(f"{path} can't be read as {kind}: {error}") from error
