"""Trains each cell of a sweep in a process of its own, on its own part of this host: GPUs, or without any cores."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TextIO

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.run_dir import has_locked
from async_rl.run.processes.resources import gpus_of_servers
from async_rl.tools.sweeps.cells import Cell


@dataclass(frozen=True, slots=True)
class CellPlace:
    """The part of this host that a cell may use: GPUs, as CUDA_VISIBLE_DEVICES names them, and cores. (): all."""

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the run's processes get."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}

    def __str__(self) -> str:
        parts = [f"{name} {','.join(map(str, ids))}" for name, ids in (("GPU", self.gpus), ("core", self.cores)) if ids]
        return ", ".join(parts) or "the whole host"


def cells_at_once(config: Config, num_gpus: int, num_cores: int) -> int:
    """Return how many cells with this configuration fit on this host without sharing a GPU or a core.

    On GPUs each learner rank and each server has its own (as many as its tp), or a pair of both has one with
    placement.colocated. Without GPUs each process has a core.
    """
    placement = config.placement
    if num_gpus:
        of_servers = 0 if placement.colocated else gpus_of_servers(config)
        return max(1, num_gpus // (placement.learner.ranks + of_servers))
    return max(1, num_cores // (placement.learner.ranks + placement.num_servers))


def divide(count: int, gpus: Sequence[str], cores: Sequence[int]) -> list[CellPlace]:
    """Return `count` places with equally many GPUs and cores. ConfigError: there are fewer GPUs or cores than places.
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
    """Return the places of this host: `parallel` of them, or if it is None as many as hold any of the cells.

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
    """Return the GPUs of this host as CUDA_VISIBLE_DEVICES names them."""
    from async_rl.run.processes.placement import gpus_here

    count = int(gpus_here())
    names = filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))
    named = list(takewhile(lambda name: name != "-1", names))  # CUDA reads no further
    # Of several MIG instances a process sees only one, but each may belong to a cell.
    return (named or [str(index) for index in range(count)]) if count else []


class CellProcesses:
    """The processes that train cells now, with their logs in `logs`. Several threads train simultaneously."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._is_stopping = False

    def train(self, command: Sequence[str], cell: Cell, place: CellPlace) -> str:
        """Train a cell by `async-rl` and the words after it; return "", or exit code and the error in the log."""
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
        """Have all runs end after their step; at once if Ctrl-C or SIGTERM comes again. Each run limits its own end.

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
        """Ask all runs to end, each with its own processes, and let no other begin; return their number.

        The first time they end in order, the second time at once.
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
    """Hold the folder of a sweep until the end of the block. ConfigError: another sweep holds it."""
    with (folder / "lock").open("w") as lock:
        if not has_locked(lock):
            raise ConfigError(f"another sweep runs in {folder}: wait until it has ended, or give this one a --name")
        yield
