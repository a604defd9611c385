"""`async-rl sweep`: runs the same training at every combination of settings and seeds, several simultaneously if asked.

Each cell is a separate process `async-rl train`, so a cell that fails does not affect the others. The same command
continues an interrupted sweep: finished cells are kept, a cell with a checkpoint resumes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.config.loading import load_config
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import list_checkpoints
from async_rl.base.run_dir.files import write_whole
from async_rl.base.run_dir.resuming import is_complete
from async_rl.base.run_dir.run_dir import create_folder, has_locked, is_locked
from async_rl.run.processes.placement import gpus_of_servers
from async_rl.run.processes.signals import StopSignals
from async_rl.tools.sweeps.cells import (
    CORRECTIONS,
    MODES,
    Axis,
    Cell,
    all_cells,
    cell_config,
    check_apart,
    check_comparable,
    check_unchanged,
    finished_cells,
    key_axis,
    make_record,
    named_axis,
    note_start,
    read_record,
    seed_axis,
    staleness_axis,
    write_record,
)
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.report import write_report
from async_rl.tools.sweeps.tables import Table

UNLIMITED_STEPS = 1_000_000
"""The run.steps of a cell whose length is limited by seconds."""


@dataclass(frozen=True, slots=True)
class CellPlace:
    """The part of this host that a cell may use: its GPUs, as in CUDA_VISIBLE_DEVICES, and its cores. (): all."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables for the run's processes."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    def __str__(self) -> str:
        parts = [f"{name} {','.join(map(str, ids))}" for name, ids in (("GPU", self.gpus), ("core", self.cores)) if ids]
        return ", ".join(parts) or "the whole host"


RunCell = Callable[[Sequence[str], Cell, CellPlace], str]
"""Trains a cell by a command in a place. Returns "", or the error if it failed."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The settings of a sweep, as given on the command line."""

    config: str
    overrides: tuple[str, ...] = ()
    axes: tuple[Axis, ...]
    folder: Path
    seconds: float = 0.0
    """The training time of every cell after its first step; 0: every cell takes run.steps learner steps."""
    max_cells: int | None = None
    """The number of cells to run in this call; None: all."""
    parallel: int | None = 1
    """The number of cells that run simultaneously; None: as many as fit on the host."""

    def base_overrides(self) -> tuple[str, ...]:
        return ("logging.wandb=disabled", "logging.trackio=false", *self.overrides, *self.limit)

    @property
    def limit(self) -> tuple[str, ...]:
        """The overrides that limit the time of cells."""
        return (f"run.seconds={self.seconds}", f"run.steps={UNLIMITED_STEPS}") if self.seconds else ()


def sweep_of(args: argparse.Namespace) -> Sweep:
    """Return the sweep described by the options of `async-rl sweep`. Raises ConfigError if an option is not allowed."""
    is_number = args.parallel.isdecimal() and int(args.parallel) > 0
    check(is_number or args.parallel == "auto", "--parallel", args.parallel, "1 or more, or auto")
    check(args.max_cells is None or args.max_cells > 0, "--max-cells", args.max_cells, "1 or more; without it all run")
    is_name = args.name is None or (Path(args.name).name == args.name and args.name not in ("", ".."))
    check(is_name, "--name", args.name, "the name of a folder in run.dir, without / (set run.dir)")
    axes = [staleness_axis(args.staleness), seed_axis(args.seeds, args.first_seed)]
    if args.mode:
        axes.append(named_axis("mode", "bounded,exact" if args.mode == "both" else args.mode, MODES))
    if args.correction:
        axes.append(named_axis("correction", args.correction, CORRECTIONS))
    axes += [key_axis(text) for text in args.axis]
    first = all_cells(axes, Path())[0]
    base = load_config(args.config, [*args.overrides, *first.overrides])  # without the axes it need not be valid
    folder = Path(base.run.dir) / (args.name or f"{base.run.name}-sweep")
    return Sweep(
        config=args.config, overrides=tuple(args.overrides), axes=tuple(axes), folder=folder, seconds=args.seconds,
        max_cells=args.max_cells, parallel=int(args.parallel) if is_number else None,
    )


@dataclass
class Progress:
    """Which cells have ended, and how. Several threads use it."""

    cells: list[Cell]
    at_once: int = 1
    """The number of cells that run simultaneously."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The duration of each finished cell, by cell name."""
    failed: dict[str, str] = field(default_factory=dict)
    """The error of each failed cell, by cell name."""

    @classmethod
    def of(cls, cells: list[Cell], at_once: int) -> Progress:
        done = {cell.name: record.seconds for cell in cells if (record := read_record(cell.folder))}
        return cls(cells, at_once, done)

    @property
    def pending(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.name not in self.seconds and cell.name not in self.failed]

    def print(self, cell: Cell, text: str) -> None:
        number = 1 + self.cells.index(cell)
        print(f"[{number}/{len(self.cells)}] {cell.name} {text}; {self.time_left()}", flush=True)

    def time_left(self) -> str:
        """Return the expected time until the last cell ends, as text, from the average duration of finished cells."""
        if not self.pending:
            return "none left"
        if not self.seconds:
            return "time left unknown"
        each_s = sum(self.seconds.values()) / len(self.seconds)
        return f"about {each_s * max(1.0, len(self.pending) / self.at_once) / 60:.0f} min left"


def run_and_report(sweep: Sweep) -> int:
    """Run the unfinished cells, write and print the report. Returns the exit code, 1 if a cell failed."""
    progress = run_sweep(sweep)
    for name, error in progress.failed.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    if progress.seconds:
        print(f"{write_report(sweep.folder)}\n\n{sweep.folder}/report.html", flush=True)
    if left := len(progress.pending):
        print(f"{left} of {len(progress.cells)} cells are left: the same command continues")
    return 1 if progress.failed else 0


def run_sweep(sweep: Sweep, run_cell: RunCell | None = None) -> Progress:
    """Run the unfinished cells with `run_cell` (default: in processes). Returns which cells finished and failed.

    Raises:
        ConfigError: a combination of settings is not valid, the folder has a sweep of another config, this host has
            too few GPUs or cores, or several simultaneous cells would run on a Ray cluster. No cell has started then.
        KeyboardInterrupt: the sweep was interrupted; the running cells have ended.
    """
    cells, configs = checked_cells(sweep)
    places = places_here(configs.values(), sweep.parallel)
    progress = Progress.of(cells, len(places))
    machine = describe_machine()
    _write_plan(sweep, machine)
    processes = CellProcesses(sweep.folder / "logs")
    train = partial(_train, sweep, configs, progress, run_cell or processes.train, machine["commit"])
    todo, running = iter(progress.pending[: sweep.max_cells]), dict[Future[None], CellPlace]()
    with sole_sweep(sweep.folder), StopSignals(), ThreadPoolExecutor(len(places)) as pool:
        try:
            running |= {pool.submit(train, cell, place): place for place, cell in zip(places, todo, strict=False)}
            while running:
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    place = running.pop(future)
                    future.result()
                    if cell := next(todo, None):
                        running[pool.submit(train, cell, place)] = place
        except BaseException:
            processes.end(partial(wait, running))
            raise
    return progress


def _train(
    sweep: Sweep, configs: Mapping[str, Config], progress: Progress, run_cell: RunCell, commit: str,
    cell: Cell, place: CellPlace,
) -> None:
    """Train one cell, from its newest checkpoint if it was interrupted, and write its record if it succeeds."""
    if is_locked(cell.folder):  # the runs of a sweep that was killed go on to their end
        progress.print(cell, "is trained by another process, and left alone")
        return
    config, command = configs[cell.name], train_command(sweep, cell)
    error, start_s = "", time.monotonic()
    if not is_complete(cell.folder, config):
        version = resumed_version(sweep, cell)
        if version is None:
            shutil.rmtree(cell.folder, ignore_errors=True)
            note_start(cell, config)
        else:
            command += ["--resume", str(cell.folder)]
        where = f" on {place}" if progress.at_once > 1 else ""
        progress.print(cell, ("starts" if version is None else f"goes on from step {version}") + where)
        error = run_cell(command, cell, place)
    if error:
        progress.failed[cell.name] = error
    else:
        seconds = time.monotonic() - start_s
        write_record(cell, make_record(cell, config, seconds, shlex.join(command), commit))
        progress.seconds[cell.name] = seconds
    progress.print(cell, error or f"took {seconds:.0f} s")


def resumed_version(sweep: Sweep, cell: Cell) -> int | None:
    """Return the version from which an interrupted cell continues, or None if it starts from the beginning.

    A cell with a time limit always starts from the beginning, because its time is compared.
    """
    return None if sweep.seconds else max(list_checkpoints(cell.folder), default=None)


def checked_cells(sweep: Sweep) -> tuple[list[Cell], dict[str, Config]]:
    """Check a sweep, and return its cells and their configurations by name. It raises the errors of `run_sweep`."""
    check_apart(sweep.axes, sweep.overrides, sweep.limit)
    cells = all_cells(sweep.axes, sweep.folder)
    configs = {cell.name: cell_config(sweep.config, sweep.base_overrides(), cell) for cell in cells}
    finished = finished_cells(sweep.folder, (axis.name for axis in sweep.axes))
    records = {cell.folder: make_record(cell, configs[cell.name]) for cell in cells}
    check_comparable([*finished.items(), *records.items()])
    for cell in cells:
        check_unchanged(cell, records[cell.folder].config)
    return cells, configs


def train_command(sweep: Sweep, cell: Cell) -> list[str]:
    return ["async-rl", "train", sweep.config, *sweep.base_overrides(), *cell.overrides, *cell.place]


def plan_of(sweep: Sweep) -> str:
    """Return a description of what the sweep would do: its cells, how many run simultaneously, where, and the time."""
    cells, configs = checked_cells(sweep)
    places = places_here(configs.values(), sweep.parallel)
    progress = Progress.of(cells, len(places))
    rows = []
    for cell in cells:
        version = resumed_version(sweep, cell)
        state = "starts" if version is None else f"goes on from step {version}"
        if cell.name in progress.seconds:
            state = f"finished in {progress.seconds[cell.name]:.0f} s"
        elif is_locked(cell.folder):
            state = "is trained by another process"
        elif is_complete(cell.folder, configs[cell.name]):
            state = "is trained, by a sweep that was ended before"
        rows.append([cell.name, state])
    left = len(progress.pending)
    todo = progress.pending[: sweep.max_cells]
    progress.cells = [cell for cell in cells if cell.name in progress.seconds or cell in todo]  # of this command
    part = f", {len(todo)} of them by this command" if len(todo) < left else ""
    time_text = progress.time_left()
    if todo and not progress.seconds and sweep.seconds:
        rounds = -(-len(todo) // len(places))
        time_text = f"{sweep.seconds * rounds / 60:.0f} min of training, and the start of each cell"
    return (
        f"{Table(('cell', ''), rows).markdown()}\n"
        f"{len(cells)} cells, {left} to do{part}, {len(places)} at once: {'; '.join(map(str, places))}\n"
        f"time: {time_text}\n"
    )


def _write_plan(sweep: Sweep, machine: dict[str, str]) -> None:
    create_folder(sweep.folder)
    plan = {
        "command": shlex.join(["async-rl", *sys.argv[1:]]), "config": sweep.config,
        "overrides": sweep.overrides, "seconds": sweep.seconds,
        "axes": {axis.name: list(axis.levels) for axis in sweep.axes}, "machine": machine,
    }  # fmt: skip
    write_whole(sweep.folder / "sweep.json", json.dumps(plan, indent=2) + "\n")


def cells_at_once(config: Config, num_gpus: int, num_cores: int) -> int:
    """Return how many cells with this configuration fit on a host without sharing a GPU or a core.

    On GPUs each learner rank has its own GPU and each server `tp` of them; with placement.colocated a pair of both has
    one. Without GPUs each process has a core.
    """
    placement = config.placement
    if num_gpus:
        of_servers = 0 if placement.colocated else gpus_of_servers(config)
        return max(1, num_gpus // (placement.learner.ranks + of_servers))
    return max(1, num_cores // (placement.learner.ranks + placement.num_servers))


def divide(count: int, gpus: Sequence[str], cores: Sequence[int]) -> list[CellPlace]:
    """Divide GPUs and cores equally into `count` places.

    Raises:
        ConfigError: there are fewer GPUs or cores than places.
    """
    if count == 1:
        return [CellPlace()]
    check(not gpus or count <= len(gpus), "--parallel", count, f"at most {len(gpus)}, the GPUs of this host")
    check(count <= len(cores), "--parallel", count, f"at most {len(cores)}, the cores of this host")
    of_gpus, of_cores = len(gpus) // count, len(cores) // count
    return [
        CellPlace(tuple(gpus[i * of_gpus : (i + 1) * of_gpus]), tuple(cores[i * of_cores : (i + 1) * of_cores]))
        for i in range(count)
    ]


def places_here(configs: Collection[Config], parallel: int | None) -> list[CellPlace]:
    """Divide this host into places for cells.

    Args:
        parallel: the number of places; None: as many as are large enough for each of the cells.

    Raises:
        ConfigError: there are fewer GPUs or cores than places, or cells would run on a Ray cluster, where Ray chooses
            the GPUs.
    """
    if parallel == 1:
        return [CellPlace()]
    gpus, cores = gpus_by_name(), sorted(os.sched_getaffinity(0))
    count = parallel or min(cells_at_once(config, len(gpus), len(cores)) for config in configs)
    is_cluster = "RAY_ADDRESS" in os.environ or any(config.placement.num_nodes > 1 for config in configs)
    allowed = "1 on a Ray cluster (RAY_ADDRESS, or cells of several nodes), where Ray chooses the GPUs"
    check(count == 1 or not is_cluster, "--parallel", count, allowed)
    return divide(count, gpus, cores)


def gpus_by_name() -> list[str]:
    """Return the names of this host's GPUs, as CUDA_VISIBLE_DEVICES takes them, such as `0` or a UUID."""
    from async_rl.run.processes.placement import gpus_here

    count = int(gpus_here())
    names = filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    named = list(takewhile(lambda name: name != "-1", names))  # CUDA reads no further
    # Of several MIG instances a process sees only one, but each may belong to a cell.
    return (named or [str(index) for index in range(count)]) if count else []


class CellProcesses:
    """The processes that are training cells, with their logs in `logs`. Several threads use it simultaneously."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_stopping = False

    def train(self, command: Sequence[str], cell: Cell, place: CellPlace) -> str:
        """Train a cell in a process. Returns "", or the exit code and the error in the log.

        Args:
            command: the words `async-rl ...`.
        """
        log_file = self._logs / f"{cell.name}.log"
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("w") as log:
            code = self._run([sys.executable, "-m", "async_rl.cli", *command[1:]], log, place)
        if code == 0:
            return ""
        lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("async-rl: error:")][-1:]  # by the command itself, at its end
        errors = [line for line in lines if "error" in line.lower()]
        return f"exit code {code}, {log_file}: {(told or errors or lines or ['nothing logged'])[0].strip()[:300]}"

    def end(self, wait: Callable[[], object]) -> None:
        """End all runs after their current steps, or immediately at another Ctrl-C or SIGTERM.

        Each run limits how long its end takes.

        Args:
            wait: waits for the calls of `train`.
        """
        try:
            if count := self.stop():
                what = f"ending {count} cell{'s' * (count > 1)} after the step that each is in, with a checkpoint"
                print(f"{what}; another Ctrl-C ends them at once", file=sys.stderr, flush=True)
            wait()
        except KeyboardInterrupt:
            self.stop()
            wait()

    def stop(self) -> int:
        """Ask all runs, each with its own processes, to end, and start no others. Returns their number.

        After the first call they end in order, after a second immediately.
        """
        with self._lock:
            self._is_stopping = True
            for process in self._running:
                process.send_signal(signal.SIGTERM)
            return len(self._running)

    def _run(self, words: Sequence[str], log: TextIO, place: CellPlace) -> int:
        with self._lock:
            if self._is_stopping:
                return -signal.SIGTERM
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **place.environment},
            )
            self._running.add(process)
            if place.cores:
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    os.sched_setaffinity(process.pid, place.cores)
        code = process.wait()
        with self._lock:
            self._running.remove(process)
        return code


@contextlib.contextmanager
def sole_sweep(folder: Path) -> Iterator[None]:
    """A context that locks the folder of a sweep. Raises ConfigError if another sweep has locked it."""
    with (folder / "lock").open("w") as lock:
        if not has_locked(lock):
            raise ConfigError(f"another sweep runs in {folder}: wait until it has ended, or give this one a --name")
        yield
