"""The records of finished cells, and which cells and records may stand side by side in one sweep."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config import Config
from async_rl.config.loading import dump_config
from async_rl.config.yaml_text import read_yaml
from async_rl.errors import ConfigError
from async_rl.storage.whole_file import write_whole
from async_rl.sweeps.cells import Cell, sets_one_of

PLACE_KEYS = ("run.name", "run.dir", "run.resume", "rollout.server_url")
"""The config keys that say where a cell runs, in which the cells of one sweep may differ."""
COUNTED_KEYS = ("guard.rollbacks",)
"""The config keys that a run writes down itself."""
_ENDS = ("startup_s", "work_s", "push_s", "wire_s", "silent_s", "shutdown_s", "pause_s", "interrupt_s")
"""The timeouts of which a run only ends or not; the others also say what an episode is worth."""
_KEPT = ("keep_last", "best_by")
"""The settings of checkpoints that only say which are kept; with keep_best pushes wait for evaluations, too."""
RESULTLESS_KEYS = ("logging", *(f"timeouts.{name}" for name in _ENDS), *(f"checkpoint.{name}" for name in _KEPT))
"""The config keys and sections that change no result, so that the cells of one sweep may differ in them."""


@dataclass(frozen=True, slots=True)
class Record:
    """The contents of `cell.json`, which a sweep writes into the folder of a finished cell."""

    labels: dict[str, str]
    config: str
    """The resolved config, as YAML."""
    seconds: float
    """The duration of the whole run, start-up included."""
    command: str
    commit: str
    """The commit of the program that ran the cell."""
    varied: Sequence[str]
    """The config keys that the axes set."""
    resumed: int = 0
    """The number of times that the cell went on from a checkpoint: its times are of so many more parts."""


def check_comparable(records: Iterable[tuple[Path, Record]]) -> None:
    """Check that cells, given with their folders, have the same config except for the keys that their axes vary, and
    for those that change no result.

    A key that is missing in one config is not compared: another version of the program may not have it.

    Raises:
        ConfigError: two cells differ in a key that no axis varies.
    """
    records = list(records)
    varied = {*PLACE_KEYS, *RESULTLESS_KEYS, *(key for _, record in records for key in record.varied)}
    if "algorithm.preset" in varied:  # a preset sets other keys of its section
        varied.add("algorithm")
    seen: dict[str, tuple[Any, Path]] = {}
    for cell, record in records:
        for key, value in leaves(read_yaml(record.config)[0]).items():
            other, elsewhere = seen.setdefault(key, (value, cell))
            if value != other and not sets_one_of(key, varied):
                raise ConfigError(
                    f"cells of one sweep must differ in its axes alone, got {key} {other} in {elsewhere} and {value} "
                    f"in {cell}. Give this sweep another --name, move the other cells away, or vary the key: "
                    f"--axis {key}=..."
                )


def check_unchanged(cell: Path, record: Record, planned: Record) -> None:
    """Check that a finished cell was trained with the settings that the sweep has for it now, but for its place and
    what changes no result.

    `check_comparable` leaves out what the axes set, so it does not see all that has changed.

    Raises:
        ConfigError: a key has another value now.
    """
    now = leaves(read_yaml(planned.config)[0])
    for key, value in leaves(read_yaml(record.config)[0]).items():
        if now.get(key, value) != value and not sets_one_of(key, (*PLACE_KEYS, *RESULTLESS_KEYS)):
            raise ConfigError(
                f"a finished cell must have the settings that this sweep has for it, got {key} {value} in {cell} and "
                f"{now[key]} now. Give this sweep another --name, or move the cell away"
            )


def leaves(tree: dict[str, Any]) -> dict[str, Any]:
    """Return {dotted key: value} of a configuration."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= {f"{key}.{inner}": leaf for inner, leaf in leaves(value).items()}
        else:
            found[key] = value
    return found


def read_record(folder: Path) -> Record | None:
    """Return the record of the finished run in a folder; None: it has none. ConfigError: the file is damaged."""
    file = folder / "cell.json"
    try:
        return Record(**json.loads(file.read_text())) if file.is_file() else None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({error}). Move its folder away: the cell then starts anew") from None


def finished_cells(folder: Path, axes: Iterable[str] | None = None) -> dict[Path, Record]:
    """Return {cell's folder: record} of a sweep's finished cells; if `axes` is given, only of cells with these axes."""
    records = {cell: record for cell in sorted((folder / "cells").glob("*")) if (record := read_record(cell))}
    names = None if axes is None else set(axes)
    return {cell: record for cell, record in records.items() if names is None or record.labels.keys() == names}


def make_record(
    cell: Cell, config: Config, seconds: float = 0.0, command: str = "", commit: str = "", resumed: int = 0
) -> Record:
    return Record(
        labels=cell.labels, config=dump_config(config), seconds=seconds, command=command, commit=commit,
        resumed=resumed, varied=[override.partition("=")[0] for override in cell.overrides],
    )


def write_record(cell: Cell, record: Record) -> None:
    write_whole(cell.folder / "cell.json", json.dumps(dataclasses.asdict(record), indent=2) + "\n")
