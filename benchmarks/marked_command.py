"""`async-rl ...` as a person starts it, all its processes findable, whoever their parent is by then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from async_rl.errors import WaitTimeoutError

ROOT = Path(__file__).parents[1]
MARK = "ASYNC_RL_MARK"
"""Environment variable that every process of a command inherits."""
END_TIMEOUT_S = 10.0


class MarkedCommand:
    """Started in a process group of its own.

    Args:
        log: file for what it prints.
    """

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "async_rl.cli", *arguments], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark}, start_new_session=True,
            )

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, timeout_s: float) -> int:
        """Its exit code.

        Raises:
            WaitTimeoutError: with the end of the log.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise WaitTimeoutError(f"still running after {timeout_s:.0f} s; log:\n{self.text()[-3000:]}") from None

    def text(self) -> str:
        """What it printed so far."""
        return self.log.read_text()

    def processes(self) -> list[psutil.Process]:
        """Those that live, zombies aside."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def orphans(self) -> list[psutil.Process]:
        """What still lives 10 s after the command itself has ended."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def kill(self) -> None:
        """Every process of it."""
        for process in self.processes():
            process.kill()
        self.process.wait(END_TIMEOUT_S)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Returns the seconds it took.

    Raises:
        WaitTimeoutError: names `what`.
    """
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() > start_s + timeout_s:
            raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.1)
    return time.monotonic() - start_s
