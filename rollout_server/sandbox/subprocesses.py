"""Runs programs as processes of their own: of any language in bubblewrap, or without containment."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import shutil
import signal
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from async_rl.errors import ConfigError
from rollout_server.sandbox.fork_server import FIRST_UID, NUM_UIDS, THREADS
from rollout_server.sandbox.pool import Ended, RunLimits

_BUBBLEWRAP = (
    "--unshare-all", "--die-with-parent", "--as-pid-1", "--new-session", "--ro-bind", "/usr", "/usr",
    "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin",
    "--proc", "/proc", "--dev", "/dev", "--size", str(32 << 20), "--tmpfs", "/tmp", "--clearenv",
    "--setenv", "PATH", "/usr/bin:/bin", "--chdir", "/tmp",
)  # fmt: skip
_PROGRAM = "/tmp/answer"


class Bubblewrap:
    """Runs files by a command, each in a container of bubblewrap: no network, no files but /usr, limited resources.

    Raises:
        ConfigError: bubblewrap is not installed, or user namespaces are forbidden.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._bwrap = shutil.which("bwrap") or ""
        if not self._bwrap:
            raise ConfigError(
                "task.rewards: the command of a reward `code` needs bubblewrap. Install it (apt-get install "
                "bubblewrap), or set task.sandbox: none, if you trust the programs"
            )
        self._command = list(command)
        self._numbers = itertools.count(os.getpid() * 61)

    async def run(self, program: str, stdin: str, limits: RunLimits) -> Ended:
        """Run a program to its end or to its deadline."""
        with tempfile.TemporaryFile() as source:
            source.write(program.encode(errors="replace"))
            source.seek(0)
            file = source.fileno()
            limit = ["prlimit", f"--nproc={THREADS}"]  # counted in the namespace of the program
            command = [*_BUBBLEWRAP, "--ro-bind-data", str(file), _PROGRAM, *limit, *self._command, _PROGRAM]
            # Root is exempt from that limit, so that each program gets a user of its own.
            user = FIRST_UID + next(self._numbers) % NUM_UIDS if os.getuid() == 0 else None
            return await _run([self._bwrap, *command], stdin, limits, user=user, files=(file,))

    async def aclose(self) -> None:
        """Do nothing: each program ends with its run."""


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

    def limit() -> None:
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
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        code = await process.wait()
        return Ended(
            exit_code=code, output=_read(output, limits), errors=_read(errors, limits), is_late=is_late,
        )  # fmt: skip


def _read(file: IO[bytes], limits: RunLimits) -> str:
    file.seek(0)
    return file.read(limits.output_bytes).decode(errors="replace")
