"""Runs programs of others contained: the client of the fork server, which it starts, and starts again when it dies."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_rl.errors import AsyncRLError
from rollout_server.sandbox.fork_server import PROJECT, STARTED
from rollout_server.sandbox.protection import find_python

START_TIMEOUT_S = 60.0
GRACE_S = 30.0
"""How long after its deadline a run may be told to have ended, before the fork server counts as hung."""
MARGIN_S = 5.0
"""How much later the time limit of a reward must be than that of its runs."""
_ATTEMPTS = 2
"""How often a run is tried if the fork server dies meanwhile."""
_CODE = "from rollout_server.sandbox.fork_server import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """The limits of one program."""

    wall_s: float = 6.0
    cpu_s: float = 5.0
    memory_bytes: int = 512 << 20
    output_bytes: int = 1 << 20
    """The most bytes of its output, and of its errors."""
    processes: int = 1
    """More than one needs namespaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended."""

    exit_code: int
    """Below 0: the signal that ended it."""
    output: str
    errors: str
    is_late: bool
    """Whether it was killed at its deadline."""
    cpu_s: float = 0.0
    most_memory_bytes: int = 0


class SandboxDiedError(AsyncRLError):
    """The fork server has died or hangs, also a second time. It is no fault of the program's."""


class SandboxPool:
    """Runs Python programs, each in a process that is forked from a server, contained, and killed at its deadline.

    All its coroutines run in one event loop.

    Args:
        has_namespaces: give each program namespaces of its own, in which it may have a temporary folder and processes.
        python: the Python that runs the programs; empty: see `find_python`.
        preload: modules that are imported once, for all programs.
        setup: a program, one that is trusted, which the server runs once; programs can import its names from the module
            `prepared`.
        is_contained: contain the programs. Otherwise they run as the user of the server, with all of its rights, but
            within their limits; the Python is then `python` or this one.
        reads_as_root: let programs read libraries alone, and where the server is of root also those of its Python that
            are closed to other users, as below /root; the Python is then `python` or this one. Not with namespaces.
        user: the user as which the server runs; None: that of this process.
    """

    def __init__(
        self, *, has_namespaces: bool = False, python: str = "", preload: Sequence[str] = (), setup: str = "",
        is_contained: bool = True, reads_as_root: bool = False, user: int | None = None,
    ) -> None:
        needs_public_python = is_contained and not reads_as_root
        self._python = find_python(python) if needs_public_python else python or sys.executable
        self._options = json.dumps({
            "has_namespaces": has_namespaces, "preload": list(preload), "setup": setup, "is_contained": is_contained,
            "reads_as_root": reads_as_root,
        })  # fmt: skip
        self._site = [] if preload or setup else ["-S"]
        self._user = user
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._can_write = asyncio.Event()
        """Set when the one who waits to send may go on: there is room, or the server has ended."""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[list[Any]]] = {}

    @property
    def server_pid(self) -> int:
        """The process of the fork server; 0 before the first run."""
        return self._server.pid if self._server else 0

    async def run(self, program: str, stdin: str = "", limits: RunLimits = RunLimits()) -> Ended:
        """Run a program to its end, or to its deadline, and return how it ended.

        Raises:
            SandboxDiedError: the fork server died or did not answer.
            AsyncRLError: it can't be started, or can't contain the program.
        """
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._run(program, stdin, limits)
            except SandboxDiedError:
                continue
        return await self._run(program, stdin, limits)

    async def aclose(self) -> None:
        """End the fork server, and with it all programs."""
        async with self._starting:
            self._hang_up()
            if self._server is not None:
                await asyncio.to_thread(_wait_for, self._server)

    async def _run(self, program: str, stdin: str, limits: RunLimits) -> Ended:
        async with self._starting:
            if self._control is None:
                await self._start()
        control, pid = self._control, self.server_pid
        assert control is not None
        files = [os.memfd_create(name) for name in ("program", "input", "output", "errors")]
        number = next(self._numbers)
        ended = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            for file, text in zip(files, (program, stdin), strict=False):
                _write(file, text.encode(errors="replace"))
            os.lseek(files[1], 0, os.SEEK_SET)
            message = json.dumps({"run": number, **dataclasses.asdict(limits)}).encode()
            try:
                await self._send(control, message, files)
                async with asyncio.timeout(limits.wall_s + GRACE_S):
                    code, is_late, cpu_s, most_memory_kb, failure = await ended
            except (OSError, TimeoutError) as error:  # TimeoutError is an OSError; both mean that nobody serves
                if self._control is control:  # else another has been started meanwhile, or none runs
                    self._give_up()
                raise SandboxDiedError(f"the sandbox's fork server {pid} has died or hangs") from error
            output, errors = (_read(file, limits.output_bytes) for file in files[2:])
        finally:
            self._waiting.pop(number, None)
            for file in files:
                os.close(file)
        if failure:
            raise AsyncRLError(f"a program could not be contained: {failure}. See `async-rl doctor`")
        return Ended(
            exit_code=int(code), output=output, errors=errors, is_late=bool(is_late), cpu_s=cpu_s,
            most_memory_bytes=int(most_memory_kb) << 10,
        )  # fmt: skip

    async def _send(self, control: socket.socket, message: bytes, files: list[int]) -> None:
        """Send a message with files, and wait while the server has too many that it has not yet read.

        One sends at a time: the event loop knows one writer of a socket.
        """
        loop = asyncio.get_running_loop()
        async with self._sending:
            while self._control is control:
                try:
                    socket.send_fds(control, [message], files)
                    return
                except BlockingIOError:
                    self._can_write.clear()
                    loop.add_writer(control, self._can_write.set)
                    try:
                        async with asyncio.timeout(GRACE_S):
                            await self._can_write.wait()
                    finally:
                        if self._control is control:
                            loop.remove_writer(control)
        raise ConnectionError("the fork server has ended")

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Programs inherit the server's memory and environment: nothing of this process may be in them.
        code = f"import sys; sys.path.insert(0, {PROJECT!r}); {_CODE}"
        arguments = (str(theirs.fileno()), self._options, owner(os.getpid()))
        command = [self._python, "-I", *self._site, "-c", code, *arguments]
        environment = {
            "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }  # fmt: skip
        server = self._server = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment, cwd="/", stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True, user=self._user,
            group=self._user, extra_groups=None if self._user is None else [],
        )  # fmt: skip
        theirs.close()
        ours.settimeout(START_TIMEOUT_S)
        try:
            told = await asyncio.to_thread(ours.recv, 64)
        except TimeoutError:
            told = b""
        if told != STARTED:
            ours.close()
            server.kill()
            lines = (await asyncio.to_thread(server.communicate))[1].decode(errors="replace").strip().splitlines()
            raise AsyncRLError(f"the sandbox's fork server can't start: {lines[-1] if lines else 'it did not answer'}")
        ours.setblocking(False)
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._receive)

    def _receive(self) -> None:
        """Tell the runs that have ended how; if the server has ended, fail all that run."""
        while self._control is not None:
            try:
                message = self._control.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                message = b""
            if not message:
                self._give_up()
                return
            number, *how = json.loads(message)
            if (ended := self._waiting.get(number)) and not ended.done():
                ended.set_result(how)

    def _give_up(self) -> None:
        """Kill the server, so that the next run starts another, and fail the runs that wait for it."""
        if self._server is not None and self._control is not None:
            self._server.kill()
        self._hang_up()

    def _hang_up(self) -> None:
        """Close the control socket, at which the server ends all programs and itself, and fail the runs that wait."""
        if self._control is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._control)
            loop.remove_writer(self._control)
            self._control.close()
        self._control = None
        self._can_write.set()
        for ended in self._waiting.values():
            if not ended.done():
                ended.set_exception(ConnectionError("the fork server has ended"))


def _wait_for(server: subprocess.Popen[bytes]) -> None:
    try:
        server.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.communicate()


def owner(worker: int) -> str:
    """Return the last word of the command lines of a worker's server and programs, for people who look for them."""
    return f"sandbox-of-{worker}"


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _read(file: int, most_bytes: int) -> str:
    return os.pread(file, most_bytes, 0).decode(errors="replace")
