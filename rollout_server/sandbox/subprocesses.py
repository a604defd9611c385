"""Runs programs as processes of their own: of any language in bubblewrap, or without containment."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import IO

from async_rl.errors import AsyncRLError, ConfigError
from rollout_server.sandbox import kernel
from rollout_server.sandbox.fork_server import FIRST_UID, NUM_UIDS, THREADS
from rollout_server.sandbox.pool import Ended, RunLimits

_BUBBLEWRAP = (
    "--unshare-all", "--die-with-parent", "--as-pid-1", "--new-session", "--ro-bind", "/usr", "/usr",
    "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin",
    "--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--proc", "/proc", "--dev", "/dev",
    "--remount-ro", "/dev", "--size", str(32 << 20), "--tmpfs", "/tmp", "--clearenv", "--setenv", "PATH",
    "/usr/bin:/bin", "--chdir", "/tmp",
)  # fmt: skip
_PROGRAM = "/tmp/answer"
_FILES = 256
"""The most open files of a process in bubblewrap."""
_PROBE_TIMEOUT_S = 30.0


class Bubblewrap:
    """Runs files by a command, each in a container of bubblewrap: no network, no files but /usr, limited resources.

    Raises:
        ConfigError: bubblewrap is not installed, or it can't contain programs here.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._bwrap = shutil.which("bwrap") or ""
        if not self._bwrap:
            raise ConfigError(
                "task.rewards: the command of a reward `code` needs bubblewrap. Install it (apt-get install "
                "bubblewrap), or set task.sandbox: none, if you trust the programs"
            )
        if error := _problem(self._bwrap, command[0]):
            raise ConfigError(f"task.rewards: programs can't run in bubblewrap on this machine: {error}")
        self._command = list(command)
        self._numbers = itertools.count(os.getpid() * 61)

    async def run(self, program: str, stdin: str, limits: RunLimits) -> Ended:
        """Run a program to its end or to its deadline.

        Raises:
            AsyncRLError: bubblewrap did not start it.
        """
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as rules, tempfile.TemporaryFile() as status:
            for file, content in ((source, program.encode(errors="replace")), (rules, kernel.refusing_filter())):
                file.write(content)
                file.seek(0)
            files = tuple(each.fileno() for each in (source, rules, status))
            refusing = ["--seccomp", str(files[1])] if kernel.IS_KNOWN_MACHINE else []
            command = [
                self._bwrap, *_BUBBLEWRAP, "--ro-bind-data", str(files[0]), _PROGRAM, "--remount-ro", "/",
                *refusing, "--json-status-fd", str(files[2]),
                # These are counted in the namespace of the program.
                "prlimit", f"--nproc={THREADS}", f"--nofile={_FILES}", *self._command, _PROGRAM,
            ]  # fmt: skip
            ended = await _run(command, stdin, limits, user=_user(next(self._numbers)), files=files)
            status.seek(0)
            if not ended.is_late and b"exit-code" not in status.read() and ended.exit_code >= 0:
                told = ended.errors.strip().splitlines() or ["it did not say why"]
                raise AsyncRLError(f"a program could not be contained: {told[-1]:.300}")
        return ended

    async def aclose(self) -> None:
        """Do nothing: each program ends with its run."""


def bubblewrap_problem() -> str:
    """Return why bubblewrap can't contain programs of other languages here; "" if it can."""
    bwrap = shutil.which("bwrap")
    return _problem(bwrap, "sh") if bwrap else "it is not installed (apt-get install bubblewrap)"


@cache
def _problem(bwrap: str, command: str) -> str:
    """Return why bubblewrap can't run a command here; "" if it can."""
    user = _user(os.getpid())
    try:
        tried = subprocess.run(
            [bwrap, *_BUBBLEWRAP, "sh", "-c", 'command -v "$1" || echo none', "sh", command], capture_output=True,
            text=True, timeout=_PROBE_TIMEOUT_S, user=user, group=user, extra_groups=None if user is None else (),
            cwd="/",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as failed:
        return str(failed)
    if tried.stdout == "none\n":
        return f"the command {command} is not below /usr, which is all that programs see"
    if tried.returncode:
        return (
            f"{(tried.stderr.strip().splitlines() or ['it failed'])[-1]}. Allow user namespaces (sysctl "
            "user.max_user_namespaces; in Docker --security-opt seccomp=unconfined), or set task.sandbox: none, if you "
            "trust the programs"
        )
    return ""


def _user(number: int) -> int | None:
    """Return the user of a program: one of its own where root runs it, for root is exempt from limits; else None."""
    return FIRST_UID + number % NUM_UIDS if os.getuid() == 0 else None


class Uncontained:
    """Runs files by a command as this user, with all of its rights; only time, memory and output are limited."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)

    async def run(self, program: str, stdin: str, limits: RunLimits) -> Ended:
        """Run a program to its end or to its deadline."""
        with tempfile.NamedTemporaryFile(prefix="answer-") as source:
            source.write(program.encode(errors="replace"))
            source.flush()
            return await _run([*self._command, source.name], stdin, limits)

    async def aclose(self) -> None:
        """Do nothing: each program ends with its run."""


async def _run(
    command: Sequence[str], stdin: str, limits: RunLimits, user: int | None = None, files: Sequence[int] = ()
) -> Ended:
    """Run a command with an input; its output goes to files, so that the kernel bounds it."""

    parent = os.getpid()

    def limit() -> None:
        kernel.die_with_parent()
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.output_bytes, limits.output_bytes))
        resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(limits.cpu_s + 1), int(limits.cpu_s + 2)))

    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        given.write(stdin.encode(errors="replace"))
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=given, stdout=output, stderr=errors, preexec_fn=limit, pass_fds=files, cwd="/",
            start_new_session=True, user=user, group=user, extra_groups=None if user is None else (),
        )  # fmt: skip
        is_late = False
        try:
            async with asyncio.timeout(limits.wall_s):
                await process.wait()
        except TimeoutError:
            is_late = True
        finally:
            if process.returncode is None:
                _end(process.pid)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = await process.wait()
        return Ended(
            exit_code=code, output=_read(output, limits), errors=_read(errors, limits), is_late=is_late,
        )  # fmt: skip


def _end(bwrap: int) -> None:
    """Kill bubblewrap and its program, its child, which does not yet end with it if it has just been forked."""
    with suppress(ProcessLookupError):
        os.kill(bwrap, signal.SIGSTOP)  # so that it forks no more
        children: list[int] = []
        with suppress(OSError), open(f"/proc/{bwrap}/task/{bwrap}/children") as file:
            children = [int(each) for each in file.read().split()]
        for each in (*children, bwrap):
            os.kill(each, signal.SIGKILL)


def _read(file: IO[bytes], limits: RunLimits) -> str:
    file.seek(0)
    return file.read(limits.output_bytes).decode(errors="replace")
