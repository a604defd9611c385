"""What a sweep writes down of its cells, and which cells may be compared in one sweep.

    sweep/cells/NAME/           the run; cell.json in it once the cell has finished
    sweep/started/NAME.yaml     the config with which the sweep has started the cell
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.loading import dump_config
from async_rl.base.config.yaml_text import read_yaml
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.whole_file import write_whole
from async_rl.base.telemetry.metrics import read_metrics
from async_rl.tools.sweeps.cells import Cell, sets_one_of

PLACE_KEYS = ("run.name", "run.dir", "run.resume", "rollout.server_url")
"""The config keys that say where a cell runs. The cells of one sweep may differ in them."""
_ENDS = ("startup_s", "batch_s", "push_s", "buffer_s", "silent_s", "shutdown_s", "pause_s", "interrupt_s")
"""The timeouts that decide only whether a run ends; the others decide about episodes too."""
RESULTLESS_KEYS = (
    "logging", *(f"timeouts.{name}" for name in _ENDS), "checkpoint.keep_last", "checkpoint.best_by"
)  # fmt: skip
"""The config keys and sections that change no result, so that the cells of one sweep may differ in them."""
WRITTEN_AT = ("time/written_at_s", "eval/written_at_s")
"""The metrics that say when a line of a run was written, in seconds of all the run's time."""


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
    """How often the cell went on from a checkpoint: its times are of so many more parts."""


def make_record(
    cell: Cell, config: Config, seconds: float = 0.0, command: str = "", commit: str = "", resumed: int = 0
) -> Record:
    varied = [override.partition("=")[0] for override in cell.overrides]
    return Record(cell.labels, dump_config(config), seconds, command, commit, varied, resumed)


def write_record(cell: Cell, record: Record) -> None:
    write_whole(cell.folder / "cell.json", json.dumps(dataclasses.asdict(record), indent=2) + "\n")


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


def note_start(cell: Cell, config: Config) -> None:
    """Write down the config with which a cell starts."""
    file = _started_file(cell)
    file.parent.mkdir(exist_ok=True)
    write_whole(file, dump_config(config))


def _started_file(cell: Cell) -> Path:
    return cell.folder.parent.parent / "started" / f"{cell.name}.yaml"


def check_comparable(records: Iterable[tuple[Path, Record]]) -> None:
    """Check that cells, given with their folders, differ only in what their axes vary and in what changes no result.

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
        for key, value in leaves(record.config).items():
            other, elsewhere = seen.setdefault(key, (value, cell))
            if value != other and not sets_one_of(key, varied):
                raise ConfigError(
                    f"cells of one sweep must differ in its axes alone, got {key} {other} in {elsewhere} and {value} "
                    f"in {cell}. Give this sweep another --name, move the other cells away, or vary the key: "
                    f"--axis {key}=..."
                )


def check_unchanged(cell: Cell, config: Config) -> None:
    """Check that the run in a cell's folder, if there is one, began with the settings that the sweep has for it now.

    Its place and what changes no result may differ.

    Raises:
        ConfigError: a key has another value now, or this sweep has not started the run.
    """
    if not cell.folder.exists():
        return
    record, file = read_record(cell.folder), _started_file(cell)
    if record is None and not file.is_file():
        raise ConfigError(f"{cell.folder} holds a run that no sweep has started: move it away, or give another --name")
    now = leaves(dump_config(config))
    for key, value in leaves(record.config if record else file.read_text()).items():
        if now.get(key, value) != value and not sets_one_of(key, (*PLACE_KEYS, *RESULTLESS_KEYS)):
            raise ConfigError(
                f"a cell must keep the settings that it began with, got {key} {value} in {cell.folder} and {now[key]} "
                "now. Give this sweep another --name, or move the cell away"
            )


def run_seconds(run_dir: Path) -> float:
    """Return the time that a run has taken, its start-ups included, until its last line of metrics."""
    times = [record.get(key) for record in read_metrics(run_dir / "metrics.jsonl") for key in WRITTEN_AT]
    return max((each for each in times if each is not None), default=0.0)


def leaves(config: str) -> dict[str, Any]:
    """Return {dotted key: value} of a configuration in YAML."""
    def walk(tree: dict[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                found[f"{prefix}{key}"] = value

    found: dict[str, Any] = {}
    walk(read_yaml(config)[0], "")
    return found
