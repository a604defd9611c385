"""Trains a cell of a sweep in a process of its own, which has one part of this host and ends with the sweep."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from async_rl.storage.run_dir import has_locked, is_locked
from async_rl.sweeps.cells import Cell
from async_rl.sweeps.places import CellPlace


class CellProcesses:
    """The processes that train cells now, with their logs in `logs`. Several threads train at once."""

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

    def stop(self) -> None:
        """Have all runs end in order, each with its own processes, and let no other begin."""
        with self._lock:
            self._is_stopping = True
            for process in self._running:
                process.send_signal(signal.SIGTERM)

    def _run(self, words: Sequence[str], log: TextIO, place: CellPlace) -> int:
        with self._lock:
            if self._is_stopping:
                return -signal.SIGTERM
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, **place.environment},
            )
            if place.cores:
                os.sched_setaffinity(process.pid, place.cores)
            self._running.add(process)
        try:
            return process.wait()
        finally:
            with self._lock:
                self._running.discard(process)


@contextlib.contextmanager
def claimed(cell: Cell, folder: Path) -> Iterator[bool]:
    """Hold a cell of the sweep in `folder` until the end of the block; yields False if another process trains it.

    Raises:
        ConfigError: the disk has no locks.
    """
    file = folder / "locks" / cell.name
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        yield has_locked(lock) and not is_locked(cell.folder)
