"""The axes of a sweep, its cells, and the files that describe a cell.

A cell is one training run: one for each combination of settings and seed.

    sweep/cells/NAME/           the run; it has a cell.json once the cell has finished
    sweep/started/NAME.yaml     the config with which the sweep has started the cell
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.config.loading import dump_config, leaves, load_config, read_yaml, text_override
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.files import write_whole

SEED = "seed"
STALENESS = "staleness"
LONGEST_NAME = 200
"""The most characters of a cell's name; a file system allows 255 bytes."""
MODES: dict[str, tuple[str, ...]] = {
    "bounded": ("staleness.mode=bounded",),
    "exact": ("staleness.mode=exact", "weight_sync.on_update=drain"),
}
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": ("algorithm.old_logprobs=recompute", "algorithm.correction.kind=none"),
    "coupled": ("algorithm.old_logprobs=rollout", "algorithm.correction.kind=none"),
    "decoupled_tis": ("algorithm.old_logprobs=recompute", "algorithm.correction.kind=token_tis"),
}


@dataclass(frozen=True, slots=True)
class Axis:
    """A setting that a sweep varies. `levels` has, by label, the overrides `key=value` of each level.

    The seed is an axis too.
    """

    name: str
    levels: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, order=True)
class Bound:
    """A staleness bound: staleness.max, with a staleness.depth of at most that.

    As text: `8` if both are 8, else `1.25/8`.
    """

    depth: float
    max: int

    def __str__(self) -> str:
        return str(self.max) if self.is_full else f"{self.depth:g}/{self.max}"

    @classmethod
    def parse(cls, text: str) -> Bound:
        """Return the bound that a text names, such as `8` (staleness.max) or `1.25/8` (staleness.depth/staleness.max).

        Raises:
            ValueError: the text is neither.
        """
        depth, _, bound = text.rpartition("/")
        return cls(float(depth or bound), int(bound))

    @classmethod
    def of_config(cls, staleness: Mapping[str, Any]) -> Bound:
        """Return the bound in the section `staleness` of a run's config file."""
        most, depth = staleness["max"], staleness.get("depth", "max")
        return cls(float(most if depth == "max" else depth), most)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The overrides that set this bound."""
        return (f"staleness.max={self.max}", f"staleness.depth={'max' if self.is_full else f'{self.depth:g}'}")

    @property
    def is_full(self) -> bool:
        """Whether the depth equals the bound."""
        return self.depth == self.max


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep. `labels` has, by the name of each axis (including the seed), the label of the cell's level.
    """

    labels: dict[str, str]
    overrides: tuple[str, ...]
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def place(self) -> tuple[str, ...]:
        """The overrides that make the run use the cell's folder: run.dir and run.name."""
        return (text_override("run.dir", self.folder.parent), text_override("run.name", self.name))


def key_axis(text: str) -> Axis:
    """Parse an axis over any config key, such as `learner.lr=1e-4,3e-4` or `task.tools=[a:b,c:d],[e:f]`.

    Raises ConfigError for other text.
    """
    key, equals, values = text.partition("=")
    levels = [value for value in re.split(r",(?![^\[]*\])", values) if value]  # no comma in a list
    if not equals or not key or not levels:
        raise ConfigError(f"--axis must be key=value,value,..., e.g. learner.lr=1e-4,3e-4; got {text!r}")
    return Axis(key, {value: (f"{key}={value}",) for value in levels})


def staleness_axis(text: str) -> Axis:
    return Axis(STALENESS, {str(bound): bound.overrides for bound in bounds_of(text)})


def seed_axis(count: int, first: int) -> Axis:
    """Return an axis with `count` seeds, starting at `first`. Raises ConfigError if `count` is below 1."""
    check(count >= 1, "--seeds", count, "at least 1")
    return Axis(SEED, {str(seed): (f"run.seed={seed}",) for seed in range(first, first + count)})


def named_axis(name: str, text: str, known: dict[str, tuple[str, ...]]) -> Axis:
    """Return the axis `name` with some of the levels in `known`. Raises ConfigError if a label is unknown.

    Args:
        text: the labels of the levels, separated by commas.
    """
    labels = text.split(",")
    for label in labels:
        if label not in known:
            raise ConfigError(f"--{name} must be one or more of {', '.join(known)}, got {label!r}")
    return Axis(name, {label: known[label] for label in labels})


def bounds_title(bounds: Iterable[Bound]) -> str:
    """Return the title of a column with these bounds: staleness.max, or depth/max if a depth is below its bound."""
    return "staleness.max" if all(bound.is_full for bound in bounds) else "depth/max"


def bounds_of(text: str) -> list[Bound]:
    """Parse bounds like `0,1,8,1.25/8` (depth/bound) to a sorted list without repeats.

    Raises ConfigError for other text, and for a depth above its bound or not a multiple of 0.25.
    """
    found = set()
    for part in text.split(","):
        if not re.fullmatch(r"(\d+(\.\d+)?/)?\d+", part):
            raise ConfigError(
                "--staleness must be values of staleness.max, each with a depth before it if you like, e.g. "
                f"0,1,8,1.25/8; got {text!r}"
            )
        bound = Bound.parse(part)
        is_depth = bound.depth <= bound.max and bound.depth % 0.25 == 0
        check(is_depth, "--staleness", part, f"a depth of 0..{bound.max} in quarters before /{bound.max}")
        found.add(bound)
    return sorted(found)


def all_cells(axes: Sequence[Axis], folder: Path) -> list[Cell]:
    """Return a cell for every combination of levels.

    The seed varies slowest, so an interrupted sweep has complete seeds.

    Raises:
        ConfigError: two cells would have the same folder.
    """
    ordered = sorted(axes, key=lambda axis: axis.name != SEED)
    cells: dict[Path, Cell] = {}
    for combination in itertools.product(*(axis.levels.items() for axis in ordered)):
        labels = {axis.name: label for axis, (label, _) in zip(ordered, combination, strict=True)}
        overrides = tuple(override for _, level in combination for override in level)
        name = ".".join(f"{key}-{labels[key]}" for key in [*(key for key in labels if key != SEED), SEED])
        cell = Cell(labels, overrides, folder / "cells" / re.sub(r"[^\w.=+-]", "_", name)[:LONGEST_NAME])
        if (other := cells.setdefault(cell.folder, cell)) is not cell:
            raise ConfigError(
                f"each cell of a sweep needs a folder of its own, got {cell.folder} for {other.labels} and for "
                f"{cell.labels}. Give one level another text: in a folder's name, characters such as / become _"
            )
    return list(cells.values())


def check_apart(axes: Sequence[Axis], overrides: Iterable[str], limit: Iterable[str]) -> None:
    """Raise ConfigError if two of these set the same key: an axis, another axis, the command line, --seconds.

    A section counts as the same key as each key in it.

    Args:
        overrides: the overrides of the command line.
        limit: the overrides that --seconds makes.
    """
    owners = {f"the axis {axis.name}": [text for level in axis.levels.values() for text in level] for axis in axes}
    owners |= {"the command line": list(overrides), "--seconds": list(limit)}
    keys = [(owner, sorted({text.partition("=")[0].strip() for text in texts})) for owner, texts in owners.items()]
    for (one, of_one), (other, of_other) in itertools.combinations(keys, 2):
        for key, again in itertools.product(of_one, of_other):
            if sets_one_of(key, [again]) or sets_one_of(again, [key]):
                raise ConfigError(
                    f"a sweep must set each key once, got {key} of {one} and {again} of {other}. Leave one of them "
                    "out: --staleness sets staleness.max and staleness.depth (1/8 is depth 1 below 8), --seeds run.seed"
                )


def cell_config(path: str, overrides: Iterable[str], cell: Cell) -> Config:
    """Return the configuration of a cell. Raises ConfigError if it can't work, or it resumes a run.

    Args:
        path: the sweep's config file.
        overrides: the overrides of all cells.
    """
    try:
        config = load_config(path, [*overrides, *cell.overrides, *cell.place])
    except ConfigError as error:
        raise ConfigError(f"cell {cell.name}: {error}") from None
    check(not config.run.resume, "run.resume", config.run.resume, "empty in a sweep, whose cells are runs of their own")
    return config


def sets_one_of(key: str, keys: Iterable[str]) -> bool:
    """Return whether a dotted key is in `keys`, or in a section that is in `keys`."""
    return f"{key}.".startswith(tuple(f"{each}." for each in keys))

PLACE_KEYS = ("run.name", "run.dir", "run.resume", "rollout.server_urls")
"""The config keys that determine where a cell runs. The cells of a sweep may differ in them."""
_ENDS = ("startup_s", "batch_s", "push_s", "buffer_s", "silent_s", "shutdown_s", "pause_s", "interrupt_s")
"""The timeouts that only determine whether a run ends. The other timeouts affect episodes too."""
RESULTLESS_KEYS = (
    "logging", *(f"timeouts.{name}" for name in _ENDS), "checkpoint.keep_last", "checkpoint.best_by"
)  # fmt: skip
"""The config keys and sections that do not change results. The cells of a sweep may differ in them."""
@dataclass(frozen=True, slots=True)
class Record:
    """The content of `cell.json`, which a sweep writes into the folder of a finished cell."""

    labels: dict[str, str]
    config: str
    """The resolved config, as YAML."""
    seconds: float
    """How long the command took, start-up included; for a resumed cell, the last one."""
    command: str
    commit: str
    """The commit of the program that ran the cell."""
    varied: Sequence[str]
    """The config keys that the axes vary."""


def make_record(cell: Cell, config: Config, seconds: float = 0.0, command: str = "", commit: str = "") -> Record:
    varied = [override.partition("=")[0] for override in cell.overrides]
    return Record(cell.labels, dump_config(config), seconds, command, commit, varied)


def write_record(cell: Cell, record: Record) -> None:
    write_whole(cell.folder / "cell.json", json.dumps(dataclasses.asdict(record), indent=2) + "\n")


def read_record(folder: Path) -> Record | None:
    """Return the record in the folder of a finished cell; None if there is none.

    Raises:
        ConfigError: the file is damaged.
    """
    file = folder / "cell.json"
    try:
        return Record(**json.loads(file.read_text())) if file.is_file() else None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is damaged ({error}). Move its folder away: the cell then starts anew") from None


def finished_cells(folder: Path, axes: Iterable[str] | None = None) -> dict[Path, Record]:
    """Return the records of a sweep's finished cells, by folder.

    Args:
        axes: only cells with exactly these axes; None: all.
    """
    records = {cell: record for cell in sorted((folder / "cells").glob("*")) if (record := read_record(cell))}
    names = None if axes is None else set(axes)
    return {cell: record for cell, record in records.items() if names is None or record.labels.keys() == names}


def note_start(cell: Cell, config: Config) -> None:
    """Write the config with which a cell starts to sweep/started."""
    file = _started_file(cell)
    file.parent.mkdir(exist_ok=True)
    write_whole(file, dump_config(config))


def _started_file(cell: Cell) -> Path:
    return cell.folder.parent.parent / "started" / f"{cell.name}.yaml"


def check_comparable(records: Iterable[tuple[Path, Record]]) -> None:
    """Check that cells differ only in keys that their axes vary and in keys that do not change results.

    A key that is missing in one config is not compared: another version of the program may not have it.

    Args:
        records: (folder, record) of each cell.

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


def check_unchanged(cell: Cell, config: str) -> None:
    """Check that the run in a cell's folder, if there is one, has the sweep's settings.

    Its folder, and settings that do not change results, may differ.

    Args:
        config: the cell's configuration now, as YAML.

    Raises:
        ConfigError: a key has another value now, or this sweep has not started the run.
    """
    if not cell.folder.exists():
        return
    record, file = read_record(cell.folder), _started_file(cell)
    if record is None and not file.is_file():
        raise ConfigError(f"{cell.folder} holds a run that no sweep has started: move it away, or give another --name")
    now = leaves(read_yaml(config)[0])
    for key, value in leaves(read_yaml(record.config if record else file.read_text())[0]).items():
        if now.get(key, value) != value and not sets_one_of(key, (*PLACE_KEYS, *RESULTLESS_KEYS)):
            raise ConfigError(
                f"a cell must keep the settings that it began with, got {key} {value} in {cell.folder} and {now[key]} "
                "now. Give this sweep another --name, or move the cell away"
            )
