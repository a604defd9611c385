"""The process of a rollout server: chooses its port, writes its log, starts it, and ends it with all its children.

A server may ask the kernel to end it together with its parent. The kernel does so when the thread that started the
server ends. So start it from a thread that lives as long as the engine, such as the event loop's.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import psutil

from async_rl.base.config import Config, Limit
from async_rl.base.errors import ProcessDiedError, WaitTimeoutError
from async_rl.base.network import open_listener
from async_rl.base.run_dir.files import end_of_log, log_tail

SERVER_PORTS = range(15_000, 32_000)
"""The ports that servers use if network.ports is not set."""
_START_ATTEMPTS = 3
_PROJECT = Path(__file__).parents[2]


def free_port(host: str, ports: Sequence[int] = ()) -> int:
    """Return a port of `ports` that is free now. By default it is below the kernel's range for outgoing connections.

    Raises:
        ConfigError: no port is free on this host.
    """
    with open_listener(host, ports or SERVER_PORTS) as listener:
        port: int = listener.getsockname()[1]
        return port


def server_seed(seed: int, index: int, log_file: Path) -> int:
    """Return the random seed for one start of a server, in 0..2**31 - 1. It differs between servers and between starts.

    With equal seeds, two servers that decode in step would sample the same numbers, and the groups of a batch would
    not be independent. Every start appends to `log_file`, so the file's size differs at a restart.
    """
    start = log_file.stat().st_size if log_file.exists() else 0
    return int(np.random.SeedSequence((seed, index, start)).generate_state(1)[0]) >> 1


def command_line(flags: Mapping[str, Any]) -> list[str]:
    """Return the command-line words `--key value ...` of the flags.

    True becomes `--key` alone, False is left out, a list becomes several values, and a dict becomes JSON.
    """
    words: list[str] = []
    for key, value in flags.items():
        if value is False:
            continue
        words.append(f"--{key}")
        if isinstance(value, list | tuple):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


class ServerProcess:
    """A server in a process of its own. `start` starts it and sets `url`, its address.

    Args:
        name: the server's name in messages.
        command: (port) -> the words of the command line.
        environment: the environment of the process; TMPDIR is replaced.
        is_ready: (base URL) -> whether the server that listens there is ours and ready. It may block.
        hints: pairs of words to look for in the log and the advice to give. The first match is used.
        shared_files: name patterns of files in shared memory that the server leaves behind when it is killed.
    """

    def __init__(
        self, name: str, log_file: Path, config: Config, *, command: Callable[[int], Sequence[str]],
        environment: Mapping[str, str], is_ready: Callable[[str], bool], hints: Sequence[tuple[str, str]],
        shared_files: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.url = ""
        self.log_file = log_file
        self._config = config
        self.command = command
        self._environment = environment
        self._is_ready = is_ready
        self._hints = hints
        self._shared_files = shared_files
        self.process: subprocess.Popen[bytes] | None = None
        self._log_start_bytes = 0

    async def start(self) -> None:
        """Start the server and return when it is ready. If another process takes its port first, try another port.

        Raises:
            ProcessDiedError: the server ended. The message has the last lines of its log.
            WaitTimeoutError: the server was not ready within `timeouts.startup_s`.
        """
        await asyncio.to_thread(sweep)
        host = self._config.network.host
        for attempt in range(1, _START_ATTEMPTS + 1):
            port = free_port(host, self._config.network.port_range)
            self.url = f"http://{host}:{port}"
            self.process = self._spawn(self.command(port))
            try:
                await self._wait_ready()
                if self._shared_files:
                    list_shared_files(self._folder, self.process.pid, self._shared_files)
                return
            except BaseException as error:
                died = isinstance(error, ProcessDiedError)
                clash = died and "address already in use" in self._log().lower()
                with suppress(WaitTimeoutError):  # why the server did not start says more
                    await self.aclose()
                if not clash or attempt == _START_ATTEMPTS:
                    raise

    def check_alive(self) -> None:
        """Raise ProcessDiedError, with the last lines of the log and a hint, if the server has ended."""
        if self.process is not None and (code := self.process.poll()) is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            tail = log_tail(self.log_file, self._log_start_bytes)
            raise ProcessDiedError(f"{self.name} ended by itself ({how}). {self._hint()}\n{tail}")

    async def aclose(self) -> None:
        """Kill the server and its children, and remove their files. A graceful shutdown would only take longer.

        Raises:
            WaitTimeoutError: the server has not ended within `timeouts.shutdown_s`.
        """
        process, self.process = self.process, None
        if process is not None:
            try:
                await asyncio.to_thread(_end_session, self.name, process, self._config.timeouts.limit("shutdown_s"))
            finally:
                remove_folder(self._folder)

    @staticmethod
    def _lasting_caches() -> dict[str, str]:
        """Return the environment variable for inductor's kernel cache.

        By default it is in TMPDIR, which every start replaces.
        """
        return {"TORCHINDUCTOR_CACHE_DIR": str(Path(gettempdir(), f"torchinductor_{os.getuid()}"))}

    def _spawn(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._folder, lock = new_folder()
        # The first variable must be one that the server leaves alone: `setproctitle` finds the process's title by it.
        folder = {"TMPDIR": str(self._folder)}
        environment = {**folder, **self._lasting_caches(), **self._environment, **folder}
        try:
            with self.log_file.open("ab") as log:
                self._log_start_bytes = log.tell()
                return subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=environment, cwd=_PROJECT,
                    start_new_session=True,  # Ctrl-C goes to the driver only, which then ends the server
                    pass_fds=(lock,),
                )
        finally:
            os.close(lock)  # from now on the server alone holds it

    async def _wait_ready(self) -> None:
        timeout_s = self._config.timeouts.startup_s
        try:
            async with asyncio.timeout(timeout_s):
                while not await asyncio.to_thread(self._is_ready, self.url):
                    self.check_alive()
                    await asyncio.sleep(0.1)  # the server sends no event when it is ready
        except TimeoutError:
            raise WaitTimeoutError(
                f"waited {timeout_s:.0f} s (timeouts.startup_s) for {self.name} to start\n"
                + log_tail(self.log_file, self._log_start_bytes)
            ) from None

    def _log(self) -> str:
        return end_of_log(self.log_file, self._log_start_bytes)

    def _hint(self) -> str:
        """Return the advice of the first entry of `hints` whose words are in the server's log, or general advice."""
        log = self._log()
        found = [hint for sign, hint in self._hints if sign in log]
        return (found or ["If nothing is logged, the kernel may have killed it for lack of memory: see `dmesg`."])[0]


def _end_session(name: str, process: subprocess.Popen[bytes], limit: Limit) -> None:
    """Kill a server and all processes that it started, and wait until it has ended.

    Args:
        name: the server's name in messages.

    Raises:
        WaitTimeoutError: it has not ended within `limit`.
    """
    children: list[psutil.Process] = []
    with suppress(psutil.Error):
        children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    try:
        process.wait(limit.seconds)
    except subprocess.TimeoutExpired:
        raise WaitTimeoutError(
            f"waited {limit} for the end of {name} (process {process.pid}), which has been killed: the kernel holds "
            "it up, often for a device or a file system. See `dmesg`"
        ) from None
    finally:
        psutil.wait_procs(children, timeout=1.0)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


FOLDER_PREFIX = "async-rl-server-"
SHARED_MEMORY = Path("/dev/shm")
_LOCK, _LIST = "lock", "shared-memory"


def new_folder() -> tuple[Path, int]:
    """Make a folder for a server. Returns the folder and an open file that keeps the folder locked while it is open.

    The server must inherit the open file. The kernel releases the lock when the server ends, however it ends. This
    works between containers too, which see each other's files but not each other's processes.
    """
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    unlocked = folder / "unlocked"
    lock = os.open(unlocked, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    unlocked.rename(folder / _LOCK)  # so there is never a lock that a sweep could take before its owner
    return folder, lock


def list_shared_files(folder: Path, pid: int, patterns: Sequence[str], shared_memory: Path = SHARED_MEMORY) -> None:
    """Write into a server's folder which files in shared memory the children of process `pid` have mapped.

    Args:
        patterns: only files whose names match one of these patterns are listed.
    """
    inodes = set()
    with suppress(psutil.Error, OSError):
        for child in psutil.Process(pid).children(recursive=True):
            lines = Path(f"/proc/{child.pid}/maps").read_text(errors="replace").splitlines()
            # By inode, because the name of a semaphore's file is another one when it is mapped.
            inodes |= {int(line.split()[4]) for line in lines if f"{shared_memory}/" in line}
    found = [path for pattern in patterns for path in shared_memory.glob(pattern)]
    names = []
    for path in found:
        with suppress(OSError):
            if path.lstat().st_ino in inodes:
                names.append(path.name)
    (folder / _LIST).write_text("".join(f"{name}\n" for name in names))


def remove_folder(folder: Path, shared_memory: Path = SHARED_MEMORY) -> None:
    """Remove the folder of a server that has ended, and the files in shared memory listed in it."""
    with suppress(FileNotFoundError):
        for name in (folder / _LIST).read_text().splitlines():
            (shared_memory / Path(name).name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def sweep(shared_memory: Path = SHARED_MEMORY) -> None:
    """Remove the folders that killed servers of this user left behind. A folder that no process locks is such a folder.

    A server that is closed normally removes its own folder; see ServerProcess.aclose.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):  # it is a live server's, or has just been removed by another sweep
            if folder.lstat().st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(folder, shared_memory)
