"""The cells of a sweep: what is varied, and where each run of it lies."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from async_rl.config import Config
from async_rl.config.check import check
from async_rl.config.loading import dump_config, load_config
from async_rl.errors import ConfigError

SEED = "seed"
STALENESS = "staleness"
MODES: dict[str, tuple[str, ...]] = {
    "bounded": ("staleness.mode=bounded",),
    "exact": ("staleness.mode=exact", "weight_sync.on_update=drain"),
}
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": ("algorithm.proximal=recompute", "algorithm.correction.kind=none"),
    "coupled": ("algorithm.proximal=behaviour", "algorithm.correction.kind=none"),
    "decoupled_tis": ("algorithm.proximal=recompute", "algorithm.correction.kind=token_tis"),
}
PLACE_KEYS = ("run.name", "run.dir", "run.resume", "rollout.server_url")
"""Of the config: where a cell runs, which is no setting of it."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One thing that is varied: label of each level, and the config keys that make it."""

    name: str
    levels: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run. `labels` names its level on every axis, the seed among them."""

    labels: dict[str, str]
    overrides: tuple[str, ...]
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name


def key_axis(text: str) -> Axis:
    """`learner.lr=1e-4,3e-4`: any key of the config. Raises ConfigError."""
    key, equals, values = text.partition("=")
    levels = [value for value in values.split(",") if value]
    if not equals or not key or not levels:
        raise ConfigError(f"--axis must be key=value,value,..., e.g. learner.lr=1e-4,3e-4; got {text!r}")
    return Axis(key, {value: (f"{key}={value}",) for value in levels})


def staleness_axis(text: str) -> Axis:
    bounds = numbers(text, "--staleness")
    return Axis(STALENESS, {str(bound): (f"staleness.max={bound}",) for bound in bounds})


def seed_axis(count: int, first: int) -> Axis:
    """Raises ConfigError."""
    check(count >= 1, "--seeds", count, "at least 1")
    return Axis(SEED, {str(seed): (f"run.seed={seed}",) for seed in range(first, first + count)})


def named_axis(name: str, text: str, known: dict[str, tuple[str, ...]]) -> Axis:
    """Levels by their names, comma separated. Raises ConfigError for one that isn't known."""
    labels = text.split(",")
    for label in labels:
        if label not in known:
            raise ConfigError(f"--{name} must be of {', '.join(known)}, got {label!r}")
    return Axis(name, {label: known[label] for label in labels})


def numbers(text: str, option: str) -> list[int]:
    """Whole numbers from 0 on, comma separated, ascending and each once. Raises ConfigError."""
    parts = text.split(",")
    if not all(re.fullmatch(r"\d+", part) for part in parts):
        raise ConfigError(f"{option} must be whole numbers, e.g. 0,1,2,4; got {text!r}")
    return sorted({int(part) for part in parts})


def all_cells(axes: Sequence[Axis], folder: Path) -> list[Cell]:
    """Every combination of levels. The seed varies slowest: a sweep cut short is a whole one with fewer seeds."""
    ordered = sorted(axes, key=lambda axis: axis.name != SEED)
    cells = []
    for combination in itertools.product(*(axis.levels.items() for axis in ordered)):
        labels = {axis.name: label for axis, (label, _) in zip(ordered, combination, strict=True)}
        overrides = tuple(override for _, level in combination for override in level)
        name = ".".join(f"{key}-{label}" for key, label in labels.items() if key != SEED)
        cells.append(Cell(labels, overrides, folder / "cells" / _file_name(f"{name}.{SEED}-{labels[SEED]}")))
    return cells


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.=+-]", "_", text)


def cell_config(path: str, overrides: Iterable[str], cell: Cell) -> Config:
    """The config of a cell's run, checked. Raises ConfigError."""
    place = (f"run.dir={cell.folder.parent}", f"run.name={cell.name}")
    return load_config(path, [*overrides, *cell.overrides, *place])


@dataclass(frozen=True, slots=True)
class Record:
    """What a sweep remembers of a cell, in `cell.json` of its folder."""

    labels: dict[str, str]
    config: str
    seconds: float
    """Of the whole run, start-up included."""
    command: str
    commit: str = ""
    """Of the program that ran it."""
    varied: Sequence[str] = ()
    """Config keys that its axes set."""


def common_settings(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Of each cell's config, by dotted key, what no axis varies: cells that are compared have it in common."""
    records = list(records)
    left_out = {*PLACE_KEYS, *(key for record in records for key in record.varied)}
    if "algorithm.preset" in left_out:  # it sets others of its section
        left_out.add("algorithm")
    beginnings = tuple(f"{key}." for key in left_out)  # an axis may vary a whole section
    return [
        {key: value for key, value in leaves.items() if not f"{key}.".startswith(beginnings)}
        for leaves in (_leaves(yaml.safe_load(record.config)) for record in records)
    ]


def check_comparable(records: Mapping[Path, Record]) -> None:
    """Keys that the config of another version of the program does not have are left out, and so are cells of one that
    did not write down what it varied.

    Raises:
        ConfigError: cells, by folder, differ in more than what their axes set.
    """
    records = {cell: record for cell, record in records.items() if record.varied}
    seen: dict[str, tuple[Any, Path]] = {}
    for cell, settings in zip(records, common_settings(records.values()), strict=True):
        for key, value in settings.items():
            other, elsewhere = seen.setdefault(key, (value, cell))
            if value != other:
                raise ConfigError(
                    f"cells of one sweep must differ in its axes alone, got {key} {other} in {elsewhere} and {value} "
                    f"in {cell}. Move those of one kind away, and give the next sweep another --name, or vary the key: "
                    f"--axis {key}=..."
                )


def _leaves(tree: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys down to the values that are no sections."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= {f"{key}.{inner}": leaf for inner, leaf in _leaves(value).items()}
        else:
            leaves[key] = value
    return leaves


def read_record(folder: Path) -> Record | None:
    """None until the cell is finished."""
    file = folder / "cell.json"
    return Record(**json.loads(file.read_text())) if file.is_file() else None


def finished_cells(folder: Path, axes: Iterable[str] | None = None) -> dict[Path, Record]:
    """Of the sweeps in `folder`; with `axes` of those over these and no other ones."""
    records = {cell: record for cell in sorted((folder / "cells").glob("*")) if (record := read_record(cell))}
    if axes is None:
        return records
    names = set(axes)
    return {cell: record for cell, record in records.items() if record.labels.keys() == names}


def make_record(cell: Cell, config: Config, seconds: float = 0.0, command: str = "", commit: str = "") -> Record:
    return Record(
        labels=cell.labels, config=dump_config(config), seconds=seconds, command=command, commit=commit,
        varied=[override.partition("=")[0] for override in cell.overrides],
    )


def write_record(cell: Cell, record: Record) -> None:
    partial = cell.folder / "cell.json.part"
    partial.write_text(json.dumps(dataclasses.asdict(record), indent=2) + "\n")
    partial.rename(cell.folder / "cell.json")


def finished(cell: Cell, config: Config) -> Record | None:
    """The record of a finished cell.

    Raises:
        ConfigError: it was run with another config.
    """
    record = read_record(cell.folder)
    if record is not None and record.config != dump_config(config):
        old, new = record.config.splitlines(), dump_config(config).splitlines()
        changed = next(((a, b) for a, b in itertools.zip_longest(old, new, fillvalue="") if a != b), ("", ""))
        raise ConfigError(
            f"{cell.folder} was run with another config ({changed[0].strip()!r}, now {changed[1].strip()!r}). "
            "Give this sweep another --name, or move the old one away"
        )
    return record
