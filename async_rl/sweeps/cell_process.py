"""Trains a cell of a sweep in a process of its own, which has one part of this host and ends with the sweep."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from async_rl.errors import StillRunningInterrupt
from async_rl.storage.run_dir import has_locked, is_locked
from async_rl.sweeps.cells import Cell
from async_rl.sweeps.places import CellPlace

POLL_S = 0.2
"""How often a run is asked whether it has ended."""


class CellProcesses:
    """The processes that train cells now, with their logs in `logs`. Several threads train at once."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._lock = threading.Lock()
        self._running: dict[subprocess.Popen[bytes], str] = {}
        """The log of each process."""
        self._is_stopping = False
        self._is_left = threading.Event()
        """Whether nobody waits for the runs any more."""

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

    def end(self, wait: Callable[[float | None], object], shutdown_s: float) -> None:
        """Have all runs end after their step, or at once if Ctrl-C or SIGTERM comes again.

        Args:
            wait: waits for the calls of `train`, at most for so many seconds.
            shutdown_s: how long the runs may take to end at once.

        Raises:
            StillRunningInterrupt: runs go on after that.
        """
        try:
            if count := self.stop():
                what = f"ending {count} cell{'s' * (count > 1)} after the step that each is in, with a checkpoint"
                print(f"{what}; another Ctrl-C ends them at once", file=sys.stderr, flush=True)
            wait(None)  # each run has a limit of its own for this, timeouts.interrupt_s
        except KeyboardInterrupt:
            try:
                self.stop()
                wait(shutdown_s)
            finally:  # a second signal may come here, where an error and no signal has begun to end the runs
                self._leave(shutdown_s)

    def _leave(self, shutdown_s: float) -> None:
        """Have `train` return at once; raise StillRunningInterrupt, which names the runs that go on, if some do."""
        self._is_left.set()
        with self._lock:
            left = [f"process {process.pid}, {log}" for process, log in self._running.items()]
        if left:
            text = f"interrupted, but runs go on that were to end within {shutdown_s:g} s (timeouts.shutdown_s)"
            raise StillRunningInterrupt(f"{text}: {'; '.join(left)}. `kill -9` ends them") from None

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
            if place.cores:
                os.sched_setaffinity(process.pid, place.cores)
            self._running[process] = log.name
        while (code := process.poll()) is None and not self._is_left.wait(POLL_S):
            pass
        if code is None:
            return -signal.SIGTERM
        with self._lock:
            del self._running[process]
        return code


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
