"""The cells of a sweep, one training run per combination of settings and seed, and the axes that set them."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config import Config, StalenessConfig
from async_rl.config.check import check
from async_rl.config.loading import load_config, text_override
from async_rl.config.yaml_text import read_yaml
from async_rl.errors import ConfigError

SEED = "seed"
STALENESS = "staleness"
LONGEST_NAME_BYTES = 200
"""A file system allows 255 bytes; a run that is set aside has a number behind its name."""
MODES: dict[str, tuple[str, ...]] = {
    "bounded": ("staleness.mode=bounded",),
    "exact": ("staleness.mode=exact", "weight_sync.on_update=drain"),
}
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "none": ("algorithm.proximal=recompute", "algorithm.correction.kind=none"),
    "coupled": ("algorithm.proximal=behaviour", "algorithm.correction.kind=none"),
    "decoupled_tis": ("algorithm.proximal=recompute", "algorithm.correction.kind=token_tis"),
}
_ADVICE = (
    "Leave one of them out, or set it by the other: --staleness 1/4,1/8 sets staleness.max 4 and 8 and staleness.depth "
    "1, --seeds and --first-seed run.seed"
)
"""The advice of the errors that a key is set twice."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting that a sweep varies: its levels by label, each with the overrides `key=value` that set it.

    The seed is an axis too.
    """

    name: str
    levels: dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, order=True)
class Bound:
    """A value of staleness.max with a depth below it. As text 8, where the depth is the bound itself, or 1.25/8."""

    depth: float
    max: int

    def __str__(self) -> str:
        return str(self.max) if self.is_full else f"{self.depth_text}/{self.max}"

    @property
    def depth_text(self) -> str:
        """The value of staleness.depth."""
        return "max" if self.is_full else f"{self.depth:g}"

    @classmethod
    def parse(cls, text: str) -> Bound:
        """Return the bound of a text like 8 or 1.25/8. Raises ValueError for other text."""
        depth, _, bound = text.rpartition("/")
        return cls.of_config({"max": int(bound), "depth": float(depth or bound)})

    @classmethod
    def of_config(cls, staleness: Mapping[str, Any]) -> Bound:
        """Return the bound of a run by the section `staleness` of its config file."""
        config = StalenessConfig(max=staleness["max"], depth=staleness.get("depth", "max"))
        return cls(float(config.batches_ahead), config.max)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings of a run at this bound."""
        return (f"staleness.max={self.max}", f"staleness.depth={self.depth_text}")

    @property
    def is_full(self) -> bool:
        """Whether the depth is the bound itself."""
        return self.depth == self.max


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
    """Return an axis over any config key, from text like `learner.lr=1e-4,3e-4` or `task.tools=[a:b,c:d],[e:f]`.

    Raises ConfigError for other text.
    """
    key, equals, values = text.partition("=")
    levels = [value for value in re.split(r",(?![^\[]*\])", values) if value]  # no comma in a list
    if not equals or not key or not levels:
        raise ConfigError(f"--axis must be key=value,value,..., e.g. learner.lr=1e-4,3e-4; got {text!r}")
    return Axis(key, {value: (f"{key}={value}",) for value in levels})


def unused_depth(config: str) -> str:
    """Return a sentence on the staleness.depth that a config file sets, as --staleness sets it in each cell, or ""."""
    section = (read_yaml(Path(config).read_text(encoding="utf-8"))[0] or {}).get(STALENESS) or {}
    if section.get("depth", "max") == "max":
        return ""
    return (
        f"staleness.depth {section['depth']} of {config} is not used: --staleness sets the depth of each cell, 8 that "
        f"of the bound and {section['depth']}/8 this one"
    )


def unused_decay(configs: Iterable[Config]) -> str:
    """Return a sentence on the values of learner.decay_fraction in cells of a given time, or "" if it is 0 in all."""
    found = sorted({config.learner.decay_fraction for config in configs} - {0.0})
    if not found:
        return ""
    return (
        f"learner.decay_fraction {', '.join(map(str, found))} has no effect with --seconds: the learning rate falls "
        "over the last share of run.steps, before which cells of a given time end. Leave --seconds out and set "
        "run.steps if it is to fall"
    )


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
        if not re.fullmatch(r"(\d+(\.\d+)?/)?\d+", part):
            raise ConfigError(
                f"--staleness must be values of staleness.max, each with a depth before it if you like, e.g. "
                f"0,1,8,1.25/8; got {text!r}"
            )
        depth, _, most = part.rpartition("/")
        may_be = float(depth or most) <= int(most) and float(depth or 0) % 0.25 == 0
        check(may_be, "--staleness", part, f"a depth of 0..{most} in quarters before /{most}")
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
        cells.append(Cell(labels, overrides, folder / "cells" / _folder_name(name)))
    by_folder: dict[Path, Cell] = {}
    for cell in cells:
        if (other := by_folder.setdefault(cell.folder, cell)) is not cell:
            raise ConfigError(
                f"the cells of a sweep must be in folders of their own, got {cell.folder} for {other.labels} and for "
                f"{cell.labels}. Give one level another text: in a folder's name, characters such as / become _"
            )
    return cells


def _folder_name(name: str) -> str:
    """Return the name of a cell's folder: that of its levels, or the beginning of it if a file's name may not be so
    long, with a number that stands for the whole.
    """
    plain = re.sub(r"[^\w.=+-]", "_", name)
    if len(plain.encode()) <= LONGEST_NAME_BYTES:
        return plain
    number = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{plain.encode()[: LONGEST_NAME_BYTES - 16].decode(errors='ignore')}-{number}"


def _check_apart(axes: Sequence[Axis]) -> None:
    """Check that no two axes set the same key, or one of them a whole section and the other a key in it."""
    keys = [(axis, {_key_of(text) for level in axis.levels.values() for text in level}) for axis in axes]
    for (one, of_one), (other, of_other) in itertools.combinations(keys, 2):
        for key, again in itertools.product(sorted(of_one), sorted(of_other)):
            if _overlap(key, again):
                raise ConfigError(
                    f"the axes of a sweep must set different keys, got {one.name}, which sets {key}, and {other.name}, "
                    f"which sets {again}. {_ADVICE}"
                )


def check_used(overrides: Iterable[str], axes: Sequence[Axis], limit: Sequence[str]) -> None:
    """Check that no setting of the command line is of a key that an axis sets in every cell, as it would go unused.

    Args:
        limit: the settings that --seconds makes in every cell.
    """
    for text, key in itertools.product(overrides, (_key_of(text) for text in limit)):
        if _overlap(_key_of(text), key):
            raise ConfigError(
                f"a setting must be of a key that --seconds does not set, got {text} and --seconds, which sets {key}. "
                "Leave the setting out, or leave --seconds out to give every cell the same steps"
            )
    every = [(axis.name, text) for axis in axes for level in axis.levels.values() for text in level]
    for (name, text), key in itertools.product(every, (_key_of(text) for text in limit)):
        if _overlap(_key_of(text), key):
            raise ConfigError(
                f"an axis must be of a key that --seconds does not set, got the axis {name}, which sets {text}, and "
                f"--seconds, which sets {key}. Leave the axis out, or leave --seconds out"
            )
    for axis in axes:
        keys = set.intersection(*({_key_of(text) for text in level} for level in axis.levels.values()))
        for text, key in itertools.product(overrides, sorted(keys)):
            if _overlap(_key_of(text), key):
                raise ConfigError(
                    f"a setting must be of a key that no axis of the sweep sets, got {text} and the axis {axis.name}, "
                    f"which sets {key}. {_ADVICE}"
                )


def check_times(configs: Iterable[Config], limit: Sequence[str]) -> None:
    """Check that no run goes back where `limit` gives every cell the same time: its seconds would begin anew."""
    for config in configs:
        check(
            not limit or config.guard.action != "rollback", "guard.action", config.guard.action,
            "any but rollback with --seconds", "A run that goes back begins its seconds anew: leave --seconds out, or "
            "set guard.action=warn.",
        )


def _key_of(override: str) -> str:
    return override.partition("=")[0].strip()


def _overlap(key: str, other: str) -> bool:
    """Return whether two keys are the same, or one of them is a section and the other a key in it."""
    return sets_one_of(key, [other]) or sets_one_of(other, [key])


def cell_config(path: str, overrides: Iterable[str], cell: Cell) -> Config:
    """Return the configuration of a cell. ConfigError: it can't work, or is that of a run that goes on."""
    try:
        config = load_config(path, [*overrides, *cell.overrides, *cell.place])
    except ConfigError as error:
        raise ConfigError(f"cell {cell.name}: {error}") from None
    allowed = "empty in a sweep, whose cells are runs of their own (the same command continues cells that were cut)"
    check(not config.run.resume, "run.resume", config.run.resume, allowed)
    return config


def sets_one_of(key: str, keys: Iterable[str]) -> bool:
    """Return whether a dotted key is one of `keys` or in one of them that is a section."""
    return f"{key}.".startswith(tuple(f"{each}." for each in keys))
