"""`async-rl sweep`: runs the same training at every combination of settings and seeds, one run at a time.

A cell is `async-rl train` in a process of its own, so a cell that fails does not affect the others. Finished cells are
kept: the same command continues a sweep that was cut short.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from async_rl.driver.signals import StopSignals
from async_rl.sweeps.cells import (
    SEED,
    Axis,
    Cell,
    all_cells,
    cell_config,
    check_comparable,
    finished_cells,
    make_record,
    read_record,
    write_record,
)
from async_rl.sweeps.machine import describe_machine
from async_rl.sweeps.report import write_report

UNLIMITED_STEPS = 1_000_000
"""The run.steps of a cell whose length is given in seconds."""


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

    def base_overrides(self) -> tuple[str, ...]:
        limit = (f"run.seconds={self.seconds}", f"run.steps={UNLIMITED_STEPS}") if self.seconds else ()
        return ("logging.wandb=disabled", *self.overrides, *limit)


@dataclass
class Progress:
    cells: list[Cell]
    seconds: dict[str, float] = field(default_factory=dict)
    """The duration of each finished cell, by cell name."""
    failed: dict[str, str] = field(default_factory=dict)
    """The error of each failed cell, by cell name."""

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
        left_s = sum(statistics.mean(known.get(settings_of(cell), everything)) for cell in self.pending)
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


def run_sweep(sweep: Sweep, run_cell: Callable[[Sweep, Cell], str] | None = None) -> Progress:
    """Run the cells that are not finished with `run_cell` (default: run_in_process); return which finished and failed.

    Raises:
        ConfigError: a combination of settings is not valid, or the folder holds a sweep of another config. No cell has
            started then.
        KeyboardInterrupt: the sweep was interrupted; the running cell has ended.
    """
    cells = all_cells(sweep.axes, sweep.folder)
    configs = {cell.name: cell_config(sweep.config, sweep.base_overrides(), cell) for cell in cells}
    planned = [(cell.folder, make_record(cell, configs[cell.name])) for cell in cells]
    check_comparable([*finished_cells(sweep.folder, (axis.name for axis in sweep.axes)).items(), *planned])
    progress = Progress(cells, {cell.name: done.seconds for cell in cells if (done := read_record(cell.folder))})
    machine = describe_machine()
    _write_plan(sweep, machine)
    with StopSignals():
        for cell in progress.pending[: sweep.max_cells]:
            shutil.rmtree(cell.folder, ignore_errors=True)  # the remains of a run that was cut short
            number = 1 + len(progress.seconds) + len(progress.failed)
            print(f"[{number}/{len(cells)}] {cell.name} starts; {progress.time_left()}", flush=True)
            start_s = time.monotonic()
            error = (run_cell or run_in_process)(sweep, cell)
            seconds = time.monotonic() - start_s
            if error:
                progress.failed[cell.name] = error
            else:
                command = shlex.join(train_command(sweep, cell))
                write_record(cell, make_record(cell, configs[cell.name], seconds, command, machine["commit"]))
                progress.seconds[cell.name] = seconds
            print(f"[{number}/{len(cells)}] {cell.name}: {error or f'{seconds:.0f} s'}", flush=True)
    return progress


def train_command(sweep: Sweep, cell: Cell) -> list[str]:
    place = (f"run.dir={cell.folder.parent}", f"run.name={cell.name}")
    return ["async-rl", "train", sweep.config, *sweep.base_overrides(), *cell.overrides, *place]


def run_in_process(sweep: Sweep, cell: Cell) -> str:
    """Train a cell in a child process; return "" if it succeeds, else its exit code and the first error in its log."""
    log_file = sweep.folder / "logs" / f"{cell.name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "async_rl.cli", *train_command(sweep, cell)[1:]]
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        process.wait()
    except BaseException:
        process.send_signal(signal.SIGTERM)  # the run then ends its own processes
        process.wait()
        raise
    if process.returncode == 0:
        return ""
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return f"exit code {process.returncode}, {log_file}: {(errors or lines or ['nothing logged'])[0].strip()[:300]}"


def _write_plan(sweep: Sweep, machine: dict[str, str]) -> None:
    sweep.folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "command": shlex.join(["async-rl", *sys.argv[1:]]), "config": sweep.config,
        "overrides": sweep.overrides, "seconds": sweep.seconds,
        "axes": {axis.name: list(axis.levels) for axis in sweep.axes}, "machine": machine,
    }  # fmt: skip
    (sweep.folder / "sweep.json").write_text(json.dumps(plan, indent=2) + "\n")
