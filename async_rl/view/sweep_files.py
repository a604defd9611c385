"""Reads the folder of a sweep: its cells, finished or not, and every metric of the finished ones by setting."""

from __future__ import annotations

import csv
import math
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.errors import AsyncRLError
from async_rl.sweeps.cells import SEED, STALENESS
from async_rl.sweeps.report import LEARNING, TRADE_OFF
from async_rl.sweeps.results import Run, read_results
from async_rl.sweeps.settings import Setting, estimate_of, settings_of
from async_rl.view.run_files import RunFiles, is_run, read_json

TITLES = {key: title for key, (title, _) in {**TRADE_OFF, **LEARNING}.items()}


@dataclass(frozen=True, slots=True)
class ListedCell:
    """One run of a sweep as the page lists it: its settings, its state, its progress and, once finished, its values."""

    name: str
    labels: dict[str, str]
    state: str
    """`finished`, `running`, `paused`, `resuming`, `stopped` or `waiting`."""
    progress: str
    values: dict[str, float]
    """The values of the report; empty until the cell is finished."""
    has_run: bool
    """Whether its run directory is here, so that there is a page for it."""


class SweepFiles:
    """The folder of one sweep. Safe to use from many threads.

    If the cells' run directories are missing, as in a sweep committed to git, the rows of runs.csv stand for them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problem = ""
        """One sentence if the finished cells can't be read together; else empty."""
        self._lock = threading.Lock()
        self._stamp: Any = None
        self._rows: list[Setting] = []

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def plan(self) -> dict[str, Any]:
        """The content of sweep.json; empty if there is none."""
        return read_json(self.folder / "sweep.json")

    def revision(self) -> dict[str, str]:
        """Return by the key `cells` a text that differs once a cell has begun, finished or changed its state."""
        files = self._records()
        finished = {file.parent for file in files}
        begun = sorted(folder for folder in (self.folder / "cells").glob("*") if folder not in finished)
        return {"cells": f"{_stamp(files)}.{','.join(_state(RunFiles(folder)) for folder in begun)}"}

    def _records(self) -> list[Path]:
        """Return the files of the finished cells."""
        return sorted((self.folder / "cells").glob("*/cell.json"))

    def rows(self) -> list[Setting]:
        """Return the finished cells by setting; none if there is none yet, or `problem` keeps them from being compared.
        """
        with self._lock:
            stamp = _stamp(self._records())
            if stamp != self._stamp:
                self._stamp, self._rows, self.problem = stamp, [], ""
                cells = self.folder / "cells"
                is_committed = not cells.is_dir() and (self.folder / "runs.csv").is_file()
                try:
                    if is_committed or any(cells.glob("*/cell.json")):
                        self._rows = settings_of(read_results(self.folder))
                except (AsyncRLError, OSError, ValueError, KeyError, TypeError, csv.Error) as error:
                    self.problem = f"The finished cells can't be compared: {error}"
            return self._rows

    def runs(self) -> list[Run]:
        return [run for row in self.rows() for run in row.runs]

    def cells(self) -> list[ListedCell]:
        """Return the finished cells with their values, those begun, and one entry for all that have to wait."""
        finished = {run.folder.name: _finished(row, run) for row in self.rows() for run in row.runs}
        begun = [folder for folder in sorted((self.folder / "cells").glob("*")) if is_run(folder)]
        found = [*finished.values(), *(_unfinished(folder) for folder in begun if folder.name not in finished)]
        waiting = self._planned() - len(found)
        names = sorted(found, key=lambda cell: [_sort_key(cell.labels.get(axis, "")) for axis in self.axes(found)])
        if waiting > 0 and finished:
            names.append(ListedCell(f"{waiting} more", {}, "waiting", "", {}, False))
        return names

    def axes(self, cells: Iterable[ListedCell]) -> list[str]:
        """Return the settings that the sweep varies, staleness first; it and the seed, the last, are never left out."""
        levels: dict[str, set[str]] = {}
        for cell in cells:
            for axis, label in cell.labels.items():
                levels.setdefault(axis, set()).add(label)
        varied = {axis for axis, found in levels.items() if len(found) > 1 or axis in (SEED, STALENESS)}
        varied |= {axis for axis, planned in self.plan.get("axes", {}).items() if len(planned) > 1}
        return sorted(varied, key=lambda axis: (axis == SEED, axis != STALENESS, axis))

    def metric_keys(self) -> list[str]:
        """Return the keys of all metrics that a finished cell measured in its steps."""
        return sorted({key for run in self.runs() for key in run.figures.all()})

    def _planned(self) -> int:
        axes = self.plan.get("axes", {})
        return math.prod(len(levels) for levels in axes.values()) if isinstance(axes, dict) and axes else 0

    def points(self, metric: str, axis: str) -> list[dict[str, Any]]:
        """Return the lines of a plot of `metric` over `axis`: a line for each setting on the other axes but the seed.

        A point is the report's estimate over the seeds with its standard error; there is none, as in the report, where
        a seed has no value. `metric` is a value of the report, or the key of a step's metric, of which a cell's figure
        over its steps is taken.
        """
        cells = [cell for cell in self.cells() if cell.state == "finished"]
        runs = {run.folder.name: run for run in self.runs()}
        axes = self.axes(cells)
        lines: dict[str, dict[str, list[float]]] = {}
        for cell in cells:
            if axis not in cell.labels:
                continue
            value = cell.values.get(metric, math.nan)
            if metric not in TITLES and cell.name in runs:
                value = runs[cell.name].figure(metric)
            others = [f"{key} {cell.labels.get(key)}" for key in axes if key not in (axis, SEED)]
            lines.setdefault(", ".join(others), {}).setdefault(cell.labels[axis], []).append(value)
        found = []
        for name, by_label in sorted(lines.items()):
            told = (label for label, values in by_label.items() if not any(map(math.isnan, values)))
            labels = sorted(told, key=_sort_key)
            if not labels:
                continue
            estimates = [estimate_of(metric, by_label[label]) for label in labels]
            errors = [0.0 if math.isnan(e.error) else e.error for e in estimates]
            found.append(
                {
                    "name": name, "labels": labels, "mean": [e.mean for e in estimates], "error": errors,
                    "seeds": [len(by_label[label]) for label in labels],
                }
            )  # fmt: skip
        return found


def is_sweep(folder: Path) -> bool:
    return (folder / "sweep.json").is_file() or (folder / "cells").is_dir()


def _stamp(files: Sequence[Path]) -> str:
    """Return a text that differs once a file has come or changed."""
    return f"{len(files)}.{max((file.stat().st_mtime_ns for file in files), default=0)}"


def _finished(row: Setting, run: Run) -> ListedCell:
    number = row.runs.index(run)
    values = {key: of_runs[number] for key, of_runs in row.values.items() if math.isfinite(of_runs[number])}
    progress = f"{len(run.steps)} steps" if run.steps else ""
    return ListedCell(run.folder.name, run.labels, "finished", progress, values, run.folder.is_dir())


def _unfinished(folder: Path) -> ListedCell:
    run = RunFiles(folder)
    run.metrics.refresh()
    labels = {SEED: str(run.setting("run.seed", "")), STALENESS: str(run.bound or "")}
    return ListedCell(folder.name, labels, _state(run), run.progress.text, {}, True)


def _state(run: RunFiles) -> str:
    """Return the state of a run without a cell.json as the page shows it."""
    name = run.state.name
    return name if name in ("running", "paused", "resuming") else "stopped"


def _sort_key(label: str) -> tuple[float, str]:
    """Return a key that sorts numbers, and bounds like 1.25/8 by their depth."""
    try:
        return float(label.partition("/")[0]), label
    except ValueError:
        return math.inf, label
