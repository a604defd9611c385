"""`async-rl sweep`: the same training at every combination of settings and seeds, one process at a time.

A cell is `async-rl train` in a process of its own: what fails in it fails alone. Finished cells are kept, so that the
same command continues a sweep that was cut short.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from async_rl.config import Config
from async_rl.driver.signals import StopSignals
from async_rl.errors import AsyncRLError, ConfigError
from benchmarks.cells import (
    SEED,
    Axis,
    Cell,
    all_cells,
    cell_config,
    check_comparable,
    finished,
    finished_cells,
    make_record,
    write_record,
)
from benchmarks.machine import describe_machine
from benchmarks.warm import WarmServer

POLL_S = 0.5
UNLIMITED_STEPS = 1_000_000
"""run.steps of a cell whose end is set by time."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a person asked for."""

    config: str
    overrides: tuple[str, ...] = ()
    axes: tuple[Axis, ...]
    folder: Path
    seconds: float = 0.0
    """Of every cell, from its first step on; 0: every cell takes run.steps learner steps."""
    max_cells: int = 0
    """Cells to run in this call; 0: all."""
    cold: bool = False
    """Every cell starts a server of its own."""

    def base_overrides(self) -> tuple[str, ...]:
        limit = (f"run.seconds={self.seconds}", f"run.steps={UNLIMITED_STEPS}") if self.seconds else ()
        return ("logging.wandb=disabled", *self.overrides, *limit)


@dataclass
class Progress:
    """Where a sweep stands."""

    cells: list[Cell]
    seconds: dict[str, float] = field(default_factory=dict)
    """[cell name] of the finished ones."""
    failed: dict[str, str] = field(default_factory=dict)
    """[cell name] last line of the error."""
    running: str = ""
    share: float = 0.0
    """Of the running cell's training."""
    since_s: float = 0.0

    @property
    def pending(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.name not in self.seconds and cell.name not in self.failed]

    def seconds_left(self) -> float | None:
        """A cell takes as long as finished ones with the same settings, else as the average one; None before any."""
        if not self.seconds:
            return None
        average = sum(self.seconds.values()) / len(self.seconds)
        like: dict[str, list[float]] = {}
        for cell in self.cells:
            if cell.name in self.seconds:
                like.setdefault(settings_of(cell), []).append(self.seconds[cell.name])
        left = [
            sum(same) / len(same) if (same := like.get(settings_of(cell), [])) else average for cell in self.pending
        ]
        spent = time.monotonic() - self.since_s if self.running else 0.0
        return max(0.0, sum(left) - spent)


def settings_of(cell: Cell) -> str:
    """Everything but the seed, for people."""
    return ", ".join(f"{key} {label}" for key, label in cell.labels.items() if key != SEED)


RunCell = Callable[[Sweep, Cell, Callable[[float], None], str], str]
"""Runs one cell on the server of the given URL (empty: its own), tells what share of it is done, and returns "" or the
error.
"""


def run_sweep(sweep: Sweep, run_cell: RunCell | None = None) -> Progress:
    """Run what is not finished yet, `run_cell` for each cell; returns where the sweep stands.

    Raises:
        ConfigError: a combination can't work, or the folder holds a sweep of another config; before anything starts.
        KeyboardInterrupt: after the running cell has ended.
    """
    cells = all_cells(sweep.axes, sweep.folder)
    configs = {cell.name: _checked_config(sweep, cell) for cell in cells}
    progress = Progress(cells)
    for cell in cells:
        if record := finished(cell, configs[cell.name]):
            progress.seconds[cell.name] = record.seconds
    planned = {cell.folder: make_record(cell, configs[cell.name]) for cell in cells}
    check_comparable(finished_cells(sweep.folder, (axis.name for axis in sweep.axes)) | planned)
    machine = describe_machine()
    _write_plan(sweep, machine)
    limit = sweep.max_cells or len(cells)
    warm = WarmServer(configs.values(), sweep.folder / "logs")
    with StopSignals(), _display(progress) as show, contextlib.closing(warm):
        for cell in progress.pending[:limit]:
            shutil.rmtree(cell.folder, ignore_errors=True)  # a run cut short; what is finished is not pending
            progress.running, progress.share, progress.since_s = cell.name, 0.0, time.monotonic()
            show(None)

            def tell(share: float) -> None:
                progress.share = share
                show(None)

            url, error = _server_url(sweep, warm, configs[cell.name])
            error = error or (run_cell or run_in_process)(sweep, cell, tell, url)
            seconds = time.monotonic() - progress.since_s
            progress.running = ""
            if error:
                progress.failed[cell.name] = error
                warm.close()  # it may be the reason, and may be left in any state
            else:
                command = shlex.join(train_command(sweep, cell))
                write_record(cell, make_record(cell, configs[cell.name], seconds, command, machine["commit"]))
                progress.seconds[cell.name] = seconds
            show(cell)
    return progress


def train_command(sweep: Sweep, cell: Cell) -> list[str]:
    place = (f"run.dir={cell.folder.parent}", f"run.name={cell.name}")
    return ["async-rl", "train", sweep.config, *sweep.base_overrides(), *cell.overrides, *place]


def _server_url(sweep: Sweep, warm: WarmServer, config: Config) -> tuple[str, str]:
    """(URL of a warm server or "", error or "")"""
    if sweep.cold:
        return "", ""
    try:
        return warm.url_for(config), ""
    except AsyncRLError as error:
        return "", str(error)


def run_in_process(sweep: Sweep, cell: Cell, tell: Callable[[float], None], url: str = "") -> str:
    """Train one cell in a child process; returns "" or the first line of its error."""
    log_file = sweep.folder / "logs" / f"{cell.name}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "async_rl.cli", *train_command(sweep, cell)[1:]]
    command += [f"rollout.server_url={url}"] if url else []
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(POLL_S)
            tell(share_done(sweep, cell))
    except BaseException:
        process.send_signal(signal.SIGTERM)  # the run ends its processes in order
        process.wait()
        raise
    if process.returncode == 0:
        return ""
    lines = [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()]
    return f"exit code {process.returncode}, {log_file}: {(errors or lines or ['nothing logged'])[0].strip()[:300]}"


def _checked_config(sweep: Sweep, cell: Cell) -> Config:
    try:
        return cell_config(sweep.config, sweep.base_overrides(), cell)
    except ConfigError as error:
        raise ConfigError(f"cell {cell.name}: {error}") from None


def share_done(sweep: Sweep, cell: Cell) -> float:
    """From the last step in the cell's metrics: steps, or time, over what is to be done."""
    try:
        with (cell.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 40_000))
            whole = [line for line in file.read().splitlines()[1:] if b'"time/step_s"' in line]
        last = json.loads(whole[-1])
    except (OSError, IndexError, ValueError):
        return 0.0
    if sweep.seconds:
        return min(1.0, float(last["time/since_first_step_s"]) / sweep.seconds)
    steps = cell_config(sweep.config, sweep.base_overrides(), cell).run.steps
    return min(1.0, float(last["step"]) / steps)


def _write_plan(sweep: Sweep, machine: dict[str, str]) -> None:
    sweep.folder.mkdir(parents=True, exist_ok=True)
    plan = {
        "command": shlex.join(["async-rl", *sys.argv[1:]]), "config": sweep.config,
        "overrides": sweep.overrides, "seconds": sweep.seconds,
        "axes": {axis.name: list(axis.levels) for axis in sweep.axes}, "machine": machine,
    }  # fmt: skip
    (sweep.folder / "sweep.json").write_text(json.dumps(plan, indent=2) + "\n")


@contextlib.contextmanager
def _display(progress: Progress) -> Iterator[Callable[[Cell | None], None]]:
    """A live table on a terminal; elsewhere a line for each cell that ended."""
    console = Console(highlight=False, markup=False, emoji=False)
    if console.is_terminal:
        with Live(progress_table(progress), console=console, refresh_per_second=2) as live:
            yield lambda cell: live.update(progress_table(progress))
        return

    def line(cell: Cell | None) -> None:
        if cell is not None:
            state = progress.failed.get(cell.name) or f"{progress.seconds[cell.name]:.0f} s"
            done = len(progress.seconds) + len(progress.failed)
            console.print(
                f"[{done}/{len(progress.cells)}] {cell.name}: {state}; {time_left(progress)}", soft_wrap=True
            )

    yield line


def time_left(progress: Progress) -> str:
    left = progress.seconds_left()
    if not progress.pending:
        return "done"
    return "time left unknown" if left is None else f"about {left / 60:.0f} min left"


def progress_table(progress: Progress) -> Group:
    """A row for each combination of settings, a column for each seed."""
    seeds = list(dict.fromkeys(cell.labels[SEED] for cell in progress.cells))
    rows: dict[str, dict[str, Text]] = {}
    for cell in progress.cells:
        rows.setdefault(settings_of(cell), {})[cell.labels[SEED]] = _state(progress, cell)
    table = Table("settings", *(f"seed {seed}" for seed in seeds), box=None)
    for settings, by_seed in rows.items():
        table.add_row(settings, *(by_seed[seed] for seed in seeds))
    done = len(progress.seconds)
    lines = [Text(f"{done} of {len(progress.cells)} cells, {time_left(progress)}")]
    lines += [Text(f"failed: {name}: {error}", style="red") for name, error in progress.failed.items()]
    return Group(table, *lines)


def _state(progress: Progress, cell: Cell) -> Text:
    if cell.name in progress.seconds:
        return Text(f"{progress.seconds[cell.name]:.0f} s", style="green")
    if cell.name in progress.failed:
        return Text("failed", style="red")
    if cell.name == progress.running:
        return Text(f"{progress.share:.0%}" if progress.share else "starts", style="bold")
    return Text("·")
