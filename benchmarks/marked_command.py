"""Runs a command and finds and ends all its processes, also those that outlive their parents."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from async_rl.base.errors import WaitTimeoutError

ROOT = Path(__file__).parents[1]
MARK = "ASYNC_RL_MARK"
"""The environment variable with a unique value that every process of a command inherits."""
ASYNC_RL = (sys.executable, "-m", "async_rl.cli")
END_TIMEOUT_S = 10.0
RAY_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Ray's own helpers. If the driver is killed, they try for 60 s to tell this to a Ray that has ended too."""


class MarkedCommand:
    """Runs a command in a process group of its own, from its creation on, and finds all processes that it started.

    Once there is one, SIGTERM raises SystemExit here, so that a `finally` can end the command.

    Args:
        log: the file that receives the command's output.
        program: the words before the arguments (default: `async-rl`).
        environment: the variables of the command; None: those of this process.
    """

    def __init__(
        self, arguments: list[str], log: Path, program: Sequence[str] = ASYNC_RL,
        environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*program, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**(os.environ if environment is None else environment), MARK: self.mark}, start_new_session=True,
            )

    def interrupt(self) -> None:
        """Send SIGINT to the process group, as Ctrl-C does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, timeout_s: float) -> int:
        """Wait for the command to end, and return its exit code.

        Raises:
            WaitTimeoutError: the command still runs after `timeout_s`. The message has the end of its log.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise WaitTimeoutError(
                f"the command still runs after {timeout_s:.0f} s; {self.log} ends:\n{self.text()[-3000:]}"
            ) from None

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Return the living processes of the command, without zombies and without RAY_AGENTS."""
        found = []
        for process in self._marked():
            with suppress(psutil.Error, OSError):
                if next(iter(process.cmdline()), "") not in RAY_AGENTS:
                    found.append(process)
        return found

    def wait_for(self, *names: str, timeout_s: float = END_TIMEOUT_S) -> list[psutil.Process]:
        """Wait until a process of the command has one of `names` in its name or command line; return all that have.

        Raises:
            WaitTimeoutError: there is none after `timeout_s`. The message lists the processes of the command.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            titles = {process: _title(process) for process in self.processes()}
            if found := [each for each, title in titles.items() if any(name in title for name in names)]:
                return found
            if time.monotonic() > deadline:
                runs = "\n".join(f"{each.pid} {title[:100]}" for each, title in titles.items()) or "no process"
                raise WaitTimeoutError(
                    f"no process {' or '.join(names)} of the command in {timeout_s:.0f} s; it has:\n{runs}"
                )
            time.sleep(0.1)

    def _marked(self) -> list[psutil.Process]:
        """Return the living processes whose environment has the mark, and their descendants, without zombies.

        A process may overwrite the memory of its environment, as `setproctitle` does: so its parent counts too.
        """
        marked, parents = {}, {}
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.status() != psutil.STATUS_ZOMBIE:
                    parents[process] = process.ppid()
                    if process.environ().get(MARK) == self.mark:
                        marked[process.pid] = process
        while children := [each for each, pid in parents.items() if pid in marked and each.pid not in marked]:
            marked |= {each.pid: each for each in children}
        return list(marked.values())

    def orphans(self) -> list[psutil.Process]:
        """Wait at most END_TIMEOUT_S for all processes of the command to end, and return those that still live."""
        deadline = time.monotonic() + END_TIMEOUT_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left

    def kill(self, grace_s: float = 0.0) -> None:
        """End every process of the command by SIGKILL; if `grace_s` is given, after SIGTERM and so many seconds."""
        if grace_s:
            processes = self._marked()
            for process in processes:
                with suppress(psutil.Error):
                    process.terminate()
            psutil.wait_procs(processes, grace_s)
        for process in self._marked():
            with suppress(psutil.Error):
                process.kill()
        self.process.wait(END_TIMEOUT_S)


def _title(process: psutil.Process) -> str:
    """Return a process's name and command line, or nothing if it has ended."""
    with suppress(psutil.Error, OSError):
        return " ".join([process.name(), *process.cmdline()])
    return ""


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Wait until `condition` is true, and return the seconds that this took.

    Raises:
        WaitTimeoutError: the condition is still false after `timeout_s`. The message names `what`.
    """
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() > start_s + timeout_s:
            raise WaitTimeoutError(f"the benchmark waited {timeout_s:.0f} s for {what}")
        time.sleep(0.1)
    return time.monotonic() - start_s
