"""The cells of a sweep, one training run per combination of settings and seed, and the records of finished cells."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config import Config, StalenessConfig
from async_rl.config.check import check
from async_rl.config.loading import dump_config, load_config, text_override
from async_rl.config.yaml_text import read_yaml
from async_rl.errors import ConfigError
from async_rl.storage.whole_file import write_whole

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
"""The config keys that say where a cell runs, in which the cells of one sweep may differ."""
COUNTED_KEYS = ("guard.rollbacks",)
"""The config keys that a run writes down itself."""
_ENDS = ("startup_s", "work_s", "push_s", "wire_s", "silent_s", "shutdown_s", "pause_s", "interrupt_s")
"""The timeouts of which a run only ends or not; the others also say what an episode is worth."""
_KEPT = ("keep_last", "keep_best", "best_by")
RESULTLESS_KEYS = ("logging", *(f"timeouts.{name}" for name in _ENDS), *(f"checkpoint.{name}" for name in _KEPT))
"""The config keys and sections that change no result, so that the cells of one sweep may differ in them."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting that a sweep varies: its levels by label, each with the overrides `key=value` that set it.

    The seed is an axis too.
    """

    name: str
    levels: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, order=True)
class Bound:
    """A value of staleness.max with a depth below it. As text 8, where the depth is the bound itself, 1.25/8 or auto/8.
    """

    depth: float
    """With depth auto, the one at which runs begin."""
    max: int
    is_auto: bool = False

    def __str__(self) -> str:
        return str(self.max) if self.is_full else f"{self.depth_text}/{self.max}"

    @property
    def depth_text(self) -> str:
        """The value of staleness.depth."""
        return "max" if self.is_full else "auto" if self.is_auto else f"{self.depth:g}"

    @classmethod
    def parse(cls, text: str) -> Bound:
        """Return the bound of a text like 8, 1.25/8 or auto/8. Raises ValueError for other text."""
        depth, _, bound = text.rpartition("/")
        return cls.of_config({"max": int(bound), "depth": depth if depth == "auto" else float(depth or bound)})

    @classmethod
    def of_config(cls, staleness: Mapping[str, Any]) -> Bound:
        """Return the bound of a run by the section `staleness` of its config file."""
        config = StalenessConfig(max=staleness["max"], depth=staleness.get("depth", "max"))
        return cls(float(config.start_depth), config.max, config.depth == "auto")

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings of a run at this bound."""
        return (f"staleness.max={self.max}", f"staleness.depth={self.depth_text}")

    @property
    def is_full(self) -> bool:
        """Whether the depth is the bound itself."""
        return self.depth == self.max and not self.is_auto


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep. `labels` has, by name of each axis (the seed is one, too), the label of the cell's level."""

    labels: dict[str, str]
    overrides: tuple[str, ...]
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def place(self) -> tuple[str, ...]:
        """The overrides by which its run is in its folder."""
        return (text_override("run.dir", self.folder.parent), text_override("run.name", self.name))


def key_axis(text: str) -> Axis:
    """Return an axis over any config key, from text like `learner.lr=1e-4,3e-4`. Raises ConfigError for other text."""
    key, equals, values = text.partition("=")
    levels = [value for value in values.split(",") if value]
    if not equals or not key or not levels:
        raise ConfigError(f"--axis must be key=value,value,..., e.g. learner.lr=1e-4,3e-4; got {text!r}")
    return Axis(key, {value: (f"{key}={value}",) for value in levels})


def staleness_axis(text: str) -> Axis:
    return Axis(STALENESS, {str(bound): bound.overrides for bound in bounds_of(text)})


def seed_axis(count: int, first: int) -> Axis:
    """Return an axis of `count` seeds, from `first` on. Raises ConfigError if `count` is below 1."""
    check(count >= 1, "--seeds", count, "at least 1")
    return Axis(SEED, {str(seed): (f"run.seed={seed}",) for seed in range(first, first + count)})


def named_axis(name: str, text: str, known: dict[str, tuple[str, ...]]) -> Axis:
    """Return the axis `name` with the levels that `text`, names of `known` levels with commas, lists.

    Raises ConfigError for an unknown level.
    """
    labels = text.split(",")
    for label in labels:
        if label not in known:
            raise ConfigError(f"--{name} must be one or more of {', '.join(known)}, got {label!r}")
    return Axis(name, {label: known[label] for label in labels})


def bounds_title(bounds: Iterable[Bound]) -> str:
    """Return what the texts of these bounds are: values of staleness.max, or of depth and staleness.max."""
    return "staleness.max" if all(bound.is_full for bound in bounds) else "depth/max"


def bounds_of(text: str) -> list[Bound]:
    """Return bounds, in text like `0,1,8,1.25/8` (depth/bound), as an ascending list without repeats.

    Raises ConfigError for other text, and for a depth over its bound or not in quarters.
    """
    found = set()
    for part in text.split(","):
        if not re.fullmatch(r"((\d+(\.\d+)?|auto)/)?\d+", part):
            raise ConfigError(
                f"--staleness must be values of staleness.max, each with a depth before it if you like, e.g. "
                f"0,1,8,1.25/8,auto/8; got {text!r}"
            )
        depth, _, most = part.rpartition("/")
        is_number = depth != "auto" and float(depth or most) <= int(most) and float(depth or 0) % 0.25 == 0
        may_be = is_number or (depth == "auto" and int(most) >= 1)
        check(may_be, "--staleness", part, f"a depth of 0..{most} in quarters, or auto with 1 or more, before /{most}")
        found.add(Bound.parse(part))
    return sorted(found)


def all_cells(axes: Sequence[Axis], folder: Path) -> list[Cell]:
    """Return a cell for every combination of levels. The seed varies slowest, so that a cut sweep has whole seeds.

    Raises:
        ConfigError: two axes set the same key, or two cells would be in one folder.
    """
    _check_apart(axes)
    ordered = sorted(axes, key=lambda axis: axis.name != SEED)
    cells = []
    for combination in itertools.product(*(axis.levels.items() for axis in ordered)):
        labels = {axis.name: label for axis, (label, _) in zip(ordered, combination, strict=True)}
        overrides = tuple(override for _, level in combination for override in level)
        name = ".".join(f"{key}-{labels[key]}" for key in [*(key for key in labels if key != SEED), SEED])
        cells.append(Cell(labels, overrides, folder / "cells" / re.sub(r"[^\w.=+-]", "_", name)))
    by_folder: dict[Path, Cell] = {}
    for cell in cells:
        if (other := by_folder.setdefault(cell.folder, cell)) is not cell:
            raise ConfigError(
                f"the cells of a sweep must be in folders of their own, got {cell.folder} for {other.labels} and for "
                f"{cell.labels}. Give one level another text: in a folder's name, characters such as / become _"
            )
    return cells


def _check_apart(axes: Sequence[Axis]) -> None:
    """Check that no two axes set the same key, or one of them a whole section and the other a key in it."""
    keys = [(axis, {o.partition("=")[0].strip() for level in axis.levels.values() for o in level}) for axis in axes]
    for (one, of_one), (other, of_other) in itertools.combinations(keys, 2):
        for key, again in itertools.product(sorted(of_one), sorted(of_other)):
            if f"{key}.".startswith(f"{again}.") or f"{again}.".startswith(f"{key}."):
                raise ConfigError(
                    f"the axes of a sweep must set different keys, got {one.name}, which sets {key}, and {other.name}, "
                    f"which sets {again}. Leave one of them out, or set it by the other: --staleness sets "
                    "staleness.max and staleness.depth, --seeds run.seed"
                )


def cell_config(path: str, overrides: Iterable[str], cell: Cell) -> Config:
    """Return the configuration of a cell. ConfigError: it can't work, or is that of a run that goes on."""
    try:
        config = load_config(path, [*overrides, *cell.overrides, *cell.place])
    except ConfigError as error:
        raise ConfigError(f"cell {cell.name}: {error}") from None
    allowed = "empty in a sweep, whose cells are runs of their own (the same command continues cells that were cut)"
    check(not config.run.resume, "run.resume", config.run.resume, allowed)
    return config


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


def sets_one_of(key: str, keys: Iterable[str]) -> bool:
    """Return whether a dotted key is one of `keys` or in one of them that is a section."""
    return f"{key}.".startswith(tuple(f"{each}." for each in keys))


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
    file = folder / "cell.json"
    return Record(**json.loads(file.read_text())) if file.is_file() else None


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
