"""`async-rl sweep`: runs the same training at every combination of settings and seeds, several at a time if asked.

A cell is `async-rl train` in a process of its own, so a cell that fails does not affect the others. Finished cells are
kept: the same command continues a sweep that was cut short. Several such commands may run at once: each cell is trained
by one of them.
"""

from __future__ import annotations

import json
import shlex
import shutil
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from pathlib import Path

from async_rl.config import Config
from async_rl.driver.signals import StopSignals
from async_rl.storage.checkpoints import lineage_of, list_checkpoints
from async_rl.storage.free_space import existing_parent, run_bytes
from async_rl.storage.hub import located, pinned
from async_rl.storage.hub_names import MODEL_KEYS, names_in, with_name
from async_rl.storage.run_dir import create_folder, is_complete, is_locked
from async_rl.sweeps.cell_process import CellProcesses, claimed
from async_rl.sweeps.cells import SEED, Axis, Cell, all_cells, cell_config, check_times, check_used
from async_rl.sweeps.cut_cells import has_settings, make_way, run_seconds
from async_rl.sweeps.machine import describe_machine
from async_rl.sweeps.places import CellPlace, places_here
from async_rl.sweeps.records import (
    check_comparable,
    check_unchanged,
    finished_cells,
    make_record,
    read_record,
    write_record,
)
from async_rl.sweeps.report import write_report
from async_rl.sweeps.tables import Table

UNLIMITED_STEPS = 1_000_000
"""The run.steps of a cell whose length is given in seconds."""


RunCell = Callable[[Sequence[str], Cell, CellPlace], str]
"""Trains a cell by a command in a place; returns "" or the error with which it failed."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The settings of a sweep, as given on the command line."""

    config: str
    overrides: tuple[str, ...] = ()
    axes: tuple[Axis, ...]
    folder: Path
    seconds: float = 0.0
    """The training time of every cell from its first step on; 0: every cell takes run.steps learner steps."""
    max_cells: int | None = None
    """The number of cells to run in this call; None: all."""
    parallel: int | None = 1
    """The number of cells that run at the same time; None: as many as the host holds."""

    def base_overrides(self) -> tuple[str, ...]:
        return ("logging.wandb=disabled", "logging.trackio=false", *self.overrides, *self.limit)

    @property
    def limit(self) -> tuple[str, ...]:
        """The overrides by which cells have a given time."""
        return (f"run.seconds={self.seconds}", f"run.steps={UNLIMITED_STEPS}") if self.seconds else ()


@dataclass(frozen=True, slots=True)
class EndedCell:
    """The end of a cell."""

    cell: Cell
    seconds: float = 0.0
    error: str = ""
    """The error with which it failed."""
    is_elsewhere: bool = False
    """Whether another process trains it, so that nothing was done."""


@dataclass
class Progress:
    """The state of a sweep: the cells that have ended, and how. Several threads say that a cell starts."""

    cells: list[Cell]
    seconds: dict[str, float] = field(default_factory=dict)
    """The duration of each finished cell, by cell name."""
    failed: dict[str, str] = field(default_factory=dict)
    """The error of each failed cell, by cell name."""
    elsewhere: list[str] = field(default_factory=list)
    """The names of the cells that another process trains."""
    at_once: int = 1
    """The number of cells that run at the same time."""
    _started: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, cells: list[Cell], at_once: int) -> Progress:
        """Return the state in which the finished cells are those that have a record."""
        done = {cell.name: record.seconds for cell in cells if (record := read_record(cell.folder))}
        return cls(cells, done, at_once=at_once)

    def say_start(self, cell: Cell, place: CellPlace, version: int | None) -> None:
        """Print that a cell starts, or goes on from a version."""
        self._started.append(cell.name)
        what = "starts" if version is None else f"goes on from step {version}"
        where = f" on {place}" if self.at_once > 1 else ""
        print(f"[{self._number(cell.name)}] {cell.name} {what}{where}; {self.time_left()}", flush=True)

    def add(self, ended: EndedCell) -> None:
        """Keep how a cell has ended, and print it."""
        name = ended.cell.name
        if ended.is_elsewhere:
            self.elsewhere.append(name)
            print(f"{name} is trained by another process, and left alone", flush=True)
            return
        if ended.error:
            self.failed[name] = ended.error
        else:
            self.seconds[name] = ended.seconds
        if name in self._started:
            print(f"[{self._number(name)}] {name}: {ended.error or f'{ended.seconds:.0f} s'}", flush=True)

    def _number(self, name: str) -> str:
        before = len({*self.seconds, *self.failed} - {*self._started})
        return f"{before + self._started.index(name) + 1}/{len(self.cells)}"

    @property
    def pending(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.name not in self.seconds and cell.name not in self.failed]

    def time_left(self) -> str:
        """Return the expected time until the last cell ends, as a text such as "about 90 min left".

        A cell is expected to take as long as finished cells with the same settings, or else as the average cell.
        """
        if not self.pending:
            return "done"
        if not self.seconds:
            return "time left unknown"
        known: dict[str, list[float]] = {}
        for cell in self.cells:
            if cell.name in self.seconds:
                known.setdefault(settings_of(cell), []).append(self.seconds[cell.name])
        everything = list(self.seconds.values())
        each_s = [statistics.mean(known.get(settings_of(cell), everything)) for cell in self.pending]
        left_s = max(sum(each_s) / self.at_once, max(each_s))
        return f"about {left_s / 60:.0f} min left"


def settings_of(cell: Cell) -> str:
    return ", ".join(f"{key} {label}" for key, label in cell.labels.items() if key != SEED)


def run_and_report(sweep: Sweep) -> int:
    """Run the cells that are not finished, write and print the report; return the exit code, 1 if a cell failed."""
    progress = run_sweep(sweep)
    for name, error in progress.failed.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    if progress.seconds:
        print(f"{write_report(sweep.folder)}\n\n{sweep.folder}/report.html", flush=True)
    if left := len(progress.pending):
        print(f"{left} of {len(progress.cells)} cells are left: the same command continues")
    return 1 if progress.failed else 0


def run_sweep(sweep: Sweep, run_cell: RunCell | None = None) -> Progress:
    """Run the cells that are not finished with `run_cell` (default: in processes); return which finished and failed.

    Raises:
        ConfigError: a combination of settings is not valid, the folder holds a sweep of another config, this host has
            too few GPUs or cores, or several cells at once would run on a Ray cluster. No cell has started then.
        KeyboardInterrupt: the sweep was interrupted; the running cells have ended, or the message names those that go
            on.
    """
    cells, configs = checked_cells(sweep)
    places = places_here(configs.values(), sweep.parallel)
    progress = Progress.of(cells, len(places))
    machine = describe_machine()
    _write_plan(sweep, machine)
    processes = CellProcesses(sweep.folder / "logs")
    train = partial(_train, sweep, configs, progress, run_cell or processes.train, machine["commit"])
    todo, running = iter(progress.pending[: sweep.max_cells]), dict[Future[EndedCell], CellPlace]()
    with StopSignals(), ThreadPoolExecutor(len(places)) as pool:
        try:
            running |= {pool.submit(train, cell, place): place for place, cell in zip(places, todo, strict=False)}
            while running:
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    place = running.pop(future)
                    progress.add(future.result())
                    if cell := next(todo, None):
                        running[pool.submit(train, cell, place)] = place
        except BaseException:
            shutdown_s = max(config.timeouts.shutdown_s for config in configs.values())
            processes.end(partial(wait, running), shutdown_s)
            raise
    return progress


def _train(
    sweep: Sweep, configs: Mapping[str, Config], progress: Progress, run_cell: RunCell, commit: str,
    cell: Cell, place: CellPlace,
) -> EndedCell:
    """Train one cell, from its newest checkpoint if it was cut short, and write its record if it succeeds.

    A cell that has a given time starts anew, because that time is what is compared.
    """
    with claimed(cell, sweep.folder) as is_ours:
        if not is_ours:
            return EndedCell(cell, is_elsewhere=True)
        if done := read_record(cell.folder):  # another sweep has trained it since this one began
            return EndedCell(cell, seconds=done.seconds)
        config, command = configs[cell.name], train_command(sweep, cell)
        if is_kept(cell, config):
            print(f"{cell.name} is trained, by a sweep that was ended before, and kept", flush=True)
            ended = EndedCell(cell, seconds=run_seconds(cell.folder))
        else:
            version = resumed_version(sweep, cell, config)
            if version is None:
                make_way(cell, config)
            else:
                command += ["--resume", str(cell.folder)]
            progress.say_start(cell, place, version)
            start_s = time.monotonic()
            error = run_cell(command, cell, place)
            seconds = time.monotonic() - start_s
            if version is not None and not error:  # with the parts before this one
                seconds = max(seconds, run_seconds(cell.folder))
            ended = EndedCell(cell, seconds=seconds, error=error)
        if not ended.error:
            write_record(cell, make_record(
                cell, config, ended.seconds, shlex.join(command), commit, lineage_of(cell.folder)
            ))  # fmt: skip
        return ended


def is_kept(cell: Cell, config: Config) -> bool:
    """Return whether the cell is trained to its end already: of a sweep that is killed the runs go on to theirs."""
    return is_complete(cell.folder, config) and has_settings(cell, config)


def resumed_version(sweep: Sweep, cell: Cell, config: Config) -> int | None:
    """Return the version from which a cell that was cut short goes on, or None if it starts anew.

    It starts anew if it began with other settings, or does not say with which, as its results would be of neither. If
    that is the version of its last step, what is left is its end: the evaluation and the summary.
    """
    newest = max(list_checkpoints(cell.folder), default=None)
    if newest is None or sweep.seconds or not has_settings(cell, config):
        return None
    return newest


def checked_cells(sweep: Sweep) -> tuple[list[Cell], dict[str, Config]]:
    """Return the cells of a sweep and their configurations by name; see `run_sweep` for what is refused."""
    cells = all_cells(sweep.axes, sweep.folder)
    check_used(sweep.overrides, sweep.axes, sweep.limit)
    configs = {cell.name: cell_config(sweep.config, sweep.base_overrides(), cell) for cell in cells}
    check_times(configs.values(), sweep.limit)
    planned = [(cell.folder, make_record(cell, configs[cell.name])) for cell in cells]
    finished = finished_cells(sweep.folder, (axis.name for axis in sweep.axes))
    check_comparable([*finished.items(), *planned])
    for folder, record in planned:
        if folder in finished:
            check_unchanged(folder, finished[folder], record)
    return cells, configs


def train_command(sweep: Sweep, cell: Cell) -> list[str]:
    return ["async-rl", "train", sweep.config, *sweep.base_overrides(), *cell.overrides, *cell.place]


def plan_of(sweep: Sweep) -> str:
    """Return what the sweep would do: its cells, how many at once and where, the time and the disk, as text."""
    from learner.memory.optimizer_state import checkpoint_bytes

    cells, configs = checked_cells(sweep)
    places = places_here(configs.values(), sweep.parallel)
    progress = Progress.of(cells, len(places))
    left, todo = len(progress.pending), progress.pending[: sweep.max_cells]
    rows = []
    for cell in cells:
        version = resumed_version(sweep, cell, configs[cell.name])
        state = "starts" if version is None else f"goes on from step {version}"
        if cell.name in progress.seconds:
            state = f"finished in {progress.seconds[cell.name]:.0f} s"
        elif is_locked(cell.folder):
            state = "is trained by another process"
        elif is_kept(cell, configs[cell.name]):
            state = "is trained, by a sweep that was ended before"
        rows.append([cell.name, state])
    progress.cells = [cell for cell in cells if cell.name in progress.seconds or cell in todo]  # of this command
    needed = sum(run_bytes(config, checkpoint_bytes(config)) for config in _on_disk(todo, configs))
    part = f", {len(todo)} of them by this command" if len(todo) < left else ""
    free = shutil.disk_usage(existing_parent(sweep.folder)).free
    lines = [
        f"{len(cells)} cells, {left} to do{part}, {len(places)} at once: {'; '.join(map(str, places))}",
        f"time: {_time_text(sweep, progress)}",
        f"disk: at most {needed / 2**30:.1f} GiB more in {sweep.folder}; {free / 2**30:.1f} GiB are free",
    ]
    return Table(("cell", ""), rows, "Cells").markdown() + "\n" + "\n".join(lines) + "\n"


def _on_disk(cells: Sequence[Cell], configs: Mapping[str, Config]) -> Iterator[Config]:
    """Yield the configurations of cells with this host's folders in place of the hub's models, whose sizes count."""
    folders: dict[tuple[str, ...], Config] = {}
    for cell in cells:
        config = configs[cell.name]
        names = tuple(name for _, name in names_in(config, MODEL_KEYS))
        if names not in folders:
            folders[names] = located(pinned(config, MODEL_KEYS))
        for key, name in names_in(config, MODEL_KEYS):
            config = with_name(config, key, name, attrgetter(key)(folders[names]))
        yield config


def _time_text(sweep: Sweep, progress: Progress) -> str:
    if progress.seconds or not progress.pending:
        return progress.time_left()
    rounds = -(-len(progress.pending) // progress.at_once)
    if not sweep.seconds:
        in_rounds = f"{rounds} round{'s' * (rounds > 1)} of up to {progress.at_once} at once"
        return f"unknown until the first cell has ended; {in_rounds}"
    minutes = sweep.seconds * rounds / 60
    return f"{minutes:.0f} min of training, and the start of each cell"


def _write_plan(sweep: Sweep, machine: dict[str, str]) -> None:
    create_folder(sweep.folder)
    plan = {
        "command": shlex.join(["async-rl", *sys.argv[1:]]), "config": sweep.config,
        "overrides": sweep.overrides, "seconds": sweep.seconds,
        "axes": {axis.name: list(axis.levels) for axis in sweep.axes}, "machine": machine,
    }  # fmt: skip
    own = sweep.folder / f"sweep.json.{uuid.uuid4().hex}"  # another process may write the same plan now
    own.write_text(json.dumps(plan, indent=2) + "\n")
    own.replace(sweep.folder / "sweep.json")
