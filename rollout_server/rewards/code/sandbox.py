"""Runs programs that a model wrote: in bubblewrap, or at a service with SandboxFusion's API.

    with Bubblewrap().open(setup) as run:           one sandbox with one interpreter, for one answer
        ended = run(program, stdin, RunLimits())    a new process for each test, forked in the sandbox

In bubblewrap a program has no network, no files but libraries, limited resources, and a deadline. The interpreter
starts with the first run. If it dies, the run is repeated once in a new interpreter.

`Service` sends each run to https://github.com/bytedance/SandboxFusion.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from http.client import HTTPResponse
from pathlib import Path
from typing import IO, Any

from async_rl.base.errors import AsyncRLError, ConfigError

START_TIMEOUT_S = 60.0
"""How long a sandbox may take to start before its first run. If it starts during a run, that run's time limit applies.
"""
MARGIN_S = 5.0
"""How much longer a reward's time limit must be than the limit of its runs."""
CLOSE_S = 1.0
"""How long a sandbox may take to end by itself."""
GRACE_S = MARGIN_S - CLOSE_S
"""How long the reply to a run may take after the run's time limit. Without a reply the run still ends within MARGIN_S.
"""
_COMPILE_S = 10.0
SERVICE_MARGIN_S = 10.0
"""How long a run at a service may last after its time limit, even if the service queues, fails or sends slowly."""
_MAX_CHARACTERS, _REST_BYTES = 12, 1 << 20
"""The most bytes of JSON for one byte each of output and errors (6 each), and those for the rest of a reply."""
PAUSES_S = (1.0, 4.0)
"""The pauses before a failed request is sent again."""
FIRST_UID, NUM_UIDS = 60000, 4096
"""The user ids of programs if root runs the worker, because root is exempt from the limit of processes."""
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip
_LINE = 64
"""The length of a reply's first line in bytes."""
_INTERPRETER = Path(__file__).with_name("interpreter.py")
_FLAGS = (
    "--unshare-user", "--disable-userns", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
    "--unshare-cgroup-try", "--die-with-parent", "--as-pid-1", "--new-session", "--ro-bind", "/usr", "/usr",
    "--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64", "--symlink", "usr/bin", "/bin",
    "--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--ro-bind-try", "/etc/localtime", "/etc/localtime",
    "--size", str(32 << 20), "--tmpfs", "/tmp", "--chdir", "/tmp",
)  # fmt: skip
_DEVICES = ("--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom")
"""The devices that Python needs. Some containers do not allow a new /proc and /dev."""
_DEVICES_OF_COMMANDS = ("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev")
_ASK = """
import marshal, os, site, sys
print(marshal.dumps(compile(sys.stdin.read(), "interpreter.py", "exec")).hex())
print(os.path.realpath(sys.executable), sys.base_prefix, *site.getsitepackages(), sep="\\n")
"""
THREE_WAYS = (
    "Either allow user namespaces (sysctl user.max_user_namespaces; in Docker --security-opt seccomp=unconfined) and "
    "install bubblewrap 0.8 or newer (apt-get install bubblewrap), or set task.sandbox.url to a service that speaks "
    "SandboxFusion's API, or set task.sandbox.kind: none if you trust the programs: they then run as this user, with "
    "files and network"
)
"""Advice for hosts where bubblewrap can't run programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """The limits of one run of a program."""

    wall_s: float = 6.0
    cpu_s: float = 5.0
    memory_bytes: int = 512 << 20
    """The most memory of each process of the program."""
    output_bytes: int = 1 << 20
    """The most bytes of standard output, of standard error, and of each file that the program writes."""
    processes: int = 16
    """The most processes and threads of the program."""


DEFAULT_LIMITS = RunLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The result of a run: how the program ended, and its output."""

    exit_code: int
    """Negative: the number of the signal that ended the program."""
    output: str
    errors: str
    is_late: bool
    """Whether the program was killed at its time limit."""
    cpu_s: float = 0.0


class SandboxDiedError(AsyncRLError):
    """A sandbox could not be started or died, and a second attempt failed too."""


RunProgram = Callable[..., Ended]
"""(program, stdin="", limits=DEFAULT_LIMITS) -> Ended. Raises SandboxDiedError. One thread at a time may call it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """A configured kind of sandbox. `open` starts one.

    Args:
        python: the Python that runs programs; empty: see `_python`.
        command: the command that runs a file, for programs in other languages than Python.
        libraries: further folders that programs can import from.
        is_contained: whether programs run in bubblewrap. If not, they have all rights of this user; time, memory and
            output are still limited.
    """

    python: str = ""
    command: Sequence[str] = ()
    libraries: Sequence[str] = ()
    is_contained: bool = True

    @contextmanager
    def open(self, setup: str = "") -> Iterator[RunProgram]:
        """A context with a function that runs programs in one sandbox.

        Args:
            setup: a trusted program that is run first. Programs find the names it defines in the dictionary `prepared`.
        """
        interpreter = Interpreter(self, setup)
        try:
            yield interpreter.run
        finally:
            interpreter.close()

    def check(self) -> None:
        """Raise ConfigError if a program can't be run in bubblewrap on this host. Without bubblewrap, check nothing."""
        if self.is_contained and (error := _problem(self.python, tuple(self.command))):
            raise ConfigError(f"task.sandbox: programs can't run in bubblewrap here: {error}. {THREE_WAYS}")

    def command_line(self, user: int | None) -> list[str]:
        """Return the command that starts the interpreter in a sandbox.

        Args:
            user: the user id of programs, if root runs the worker; None: the worker's own.
        """
        code, python, prefix, *packages = _ask(self.python or _python())
        libraries = [os.path.realpath(each) for each in (*packages, *self.libraries) if os.path.isdir(each)]
        load = f"import marshal; exec(marshal.loads(bytes.fromhex('{code}')))"
        start = [python, "-I", "-S", "-c", load, ":".join(libraries), *self.command]
        if not self.is_contained:
            return start
        bwrap = shutil.which("bwrap") or "bwrap"
        folders = [os.path.realpath(each) for each in (f"{prefix}/bin", f"{prefix}/lib", *libraries)]
        folders = [each for each in dict.fromkeys(folders) if not each.startswith("/usr/")]
        seen = [word for each in folders for word in ("--ro-bind-try", each, each)]
        devices = _DEVICES_OF_COMMANDS if self.command else _DEVICES
        inner = [bwrap, *_FLAGS, *devices, *seen, "--remount-ro", "/", *start]
        if user is None:
            return inner
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        closed = {each: top for each in folders if (top := _closed_to_others(Path(each)))}
        if not closed:
            return [*as_user, *inner]
        # A user of its own can't enter /root, say: an outer bubblewrap of root shows it nothing but these folders.
        outer = [bwrap, "--die-with-parent", "--dev-bind", "/", "/"]
        for top in dict.fromkeys(closed.values()):
            outer += ["--perms", "0755", "--tmpfs", str(top)]
        for each, top in closed.items():
            inside = [parent for parent in Path(each).parents if top in parent.parents]
            outer += [word for parent in reversed(inside) for word in ("--perms", "0755", "--dir", str(parent))]
            outer += ["--ro-bind", each, each]
        return [*outer, *as_user, *inner]


@dataclass(slots=True)
class Interpreter:
    """A sandbox with its interpreter process, which starts with the first run. Only one thread at a time may use it."""

    sandbox: Bubblewrap
    setup: str
    process: subprocess.Popen[bytes] | None = None
    _errors: IO[bytes] | None = field(default=None, repr=False)

    def run(self, program: str, stdin: str = "", limits: RunLimits = DEFAULT_LIMITS) -> Ended:
        """Run a program until it ends or is late, and return its result.

        The call takes at most `limits.wall_s` + GRACE_S, even if it has to start the sandbox.

        Raises:
            SandboxDiedError: the sandbox did not start, died twice, or did not answer in time.
        """
        end_s = time.monotonic() + limits.wall_s + GRACE_S
        try:
            return self._run(program, stdin, limits, end_s)
        except SandboxDiedError:
            if time.monotonic() >= end_s:
                raise
            return self._run(program, stdin, limits, end_s)

    def close(self) -> None:
        """End the sandbox: close its input, upon which it ends by itself, with the program that it runs."""
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin and process.stdout and self._errors
        with suppress(OSError):
            process.stdin.close()
        ended, poll = os.pidfd_open(process.pid), select.poll()
        poll.register(ended, select.POLLIN)
        if not poll.poll(CLOSE_S * 1000):
            os.killpg(process.pid, signal.SIGKILL)  # an outer bubblewrap may not signal the user of the inner one
        os.close(ended)
        process.wait()
        process.stdout.close()
        self._errors.close()

    def start(self, end_s: float = math.inf) -> None:
        """Start the interpreter and wait until its setup is done, until time `end_s`, but at most START_TIMEOUT_S.

        Raises:
            SandboxDiedError: it has failed, or is not ready by then.
        """
        end_s = min(end_s, time.monotonic() + START_TIMEOUT_S)
        user = FIRST_UID + next(_numbers) % NUM_UIDS if os.getuid() == 0 and self.sandbox.is_contained else None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self.process = subprocess.Popen(
                self.sandbox.command_line(user), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
                env=_ENVIRONMENT, cwd="/", bufsize=0, process_group=0,
            )
        except OSError as error:
            raise SandboxDiedError(f"a sandbox could not be started: {error}") from error
        assert self.process.stdin
        os.set_blocking(self.process.stdin.fileno(), False)
        setup = self.setup.encode()
        self._send(b"%d\n%b" % (len(setup), setup), end_s)
        if self._read(_LINE, end_s).strip() != b"ready":
            raise self._death("could not be started")

    def _run(self, program: str, stdin: str, limits: RunLimits, end_s: float) -> Ended:
        if self.process is None:
            self.start(end_s)
        source, given = program.encode(errors="replace"), stdin.encode(errors="replace")
        of_run = (limits.wall_s, limits.cpu_s, limits.memory_bytes, limits.output_bytes, limits.processes)
        numbers = " ".join(map(str, (len(source), len(given), *of_run)))
        self._send(b"%b\n%b%b" % (numbers.encode(), source, given), end_s)
        try:
            code, is_late, cpu_s, *lengths = self._read(_LINE, end_s).split()
            sizes = [min(int(each), limits.output_bytes) for each in lengths]
            output, errors = (self._read(size, end_s) for size in sizes)
            return Ended(
                exit_code=int(code), is_late=bool(int(is_late)), cpu_s=float(cpu_s),
                output=output.decode(errors="replace"), errors=errors.decode(errors="replace"),
            )  # fmt: skip
        except ValueError:
            raise self._death("died during a run") from None

    def _send(self, data: bytes, end_s: float) -> None:
        assert self.process and self.process.stdin
        left, poll = memoryview(data), select.poll()
        poll.register(self.process.stdin, select.POLLOUT)
        try:
            while left:
                if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
                    raise self._death("did not read")
                left = left[self.process.stdin.write(left) or 0 :]
        except OSError:
            raise self._death("died") from None

    def _read(self, size: int, end_s: float) -> bytes:
        """Return `size` bytes from the interpreter, or fewer if it has ended.

        Raises:
            SandboxDiedError: the bytes have not come by time `end_s`.
        """
        assert self.process and self.process.stdout
        file, found = self.process.stdout.fileno(), bytearray()
        poll = select.poll()
        poll.register(file, select.POLLIN)
        while len(found) < size:
            if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
                raise self._death("did not answer")
            if not (read := os.read(file, size - len(found))):
                break
            found += read
        return bytes(found)

    def _death(self, what: str) -> SandboxDiedError:
        """End the failed sandbox, and return the error to raise. It includes what the sandbox wrote to standard error.

        Args:
            what: what has failed, for the message.
        """
        assert self._errors
        errors = self._errors
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.close()
        with errors:
            errors.seek(0)
            lines = errors.read(1 << 16).decode(errors="replace").strip().splitlines()
        return SandboxDiedError(f"a sandbox {what}: {lines[-1]:.300}" if lines else f"a sandbox {what}")


_numbers = itertools.count(os.getpid() * 61)  # workers of one machine rarely use the same users


def _python() -> str:
    """Return the Python that runs programs: this process's, or /usr/bin/python3 where other users can't reach this one.

    Root starts programs as another user, who may have no access to this process's Python. A Python that this user can
    read spares a second bubblewrap.
    """
    is_closed = os.getuid() == 0 and _closed_to_others(Path(sys.executable).resolve())
    return "/usr/bin/python3" if is_closed and os.path.exists("/usr/bin/python3") else sys.executable


@cache
def _ask(python: str) -> list[str]:
    """Ask a Python for [the compiled code of interpreter.py, its executable, its prefix, its package folders...]."""
    try:
        asked = subprocess.run(
            [python, "-I", "-c", _ASK], input=_INTERPRETER.read_text(), capture_output=True, text=True, timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"the Python of programs {python} does not run: {error}") from None
    return asked.stdout.splitlines()


@cache
def _problem(python: str, command: tuple[str, ...]) -> str:
    """Return why programs can't run in bubblewrap; "" if they can."""
    if not shutil.which("bwrap"):
        return "it is not installed"
    look = f"import shutil; print(shutil.which({command[0]!r}) or '')" if command else "print('found')"
    try:
        with Bubblewrap(python=python).open() as run:
            ended = run(look, limits=RunLimits(wall_s=START_TIMEOUT_S))
    except SandboxDiedError as error:
        return str(error)
    if ended.exit_code:
        return (ended.errors.strip().splitlines() or ["a program failed"])[-1]
    return "" if ended.output.strip() else f"the command {command[0]} is not below /usr, which is all that programs see"


def _closed_to_others(folder: Path) -> Path | None:
    """Return the outermost folder of a path, the path included, that not every user can enter; None if there is none.
    """
    for each in (*reversed(folder.parents), folder):
        with suppress(OSError):
            if not each.stat().st_mode & 1:
                return each
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Runs programs at a service by `POST /run_code`. The service contains them and limits their output.

    Args:
        url: the service's address.
        language: the language of the programs, as the service names it.
    """

    url: str
    language: str = "python"

    @contextmanager
    def open(self, setup: str = "") -> Iterator[RunProgram]:
        """A context with the function that runs programs. Each run is a separate request."""
        yield self.run

    def run(self, program: str, stdin: str = "", limits: RunLimits = DEFAULT_LIMITS) -> Ended:
        """Run a program at the service. Raises SandboxDiedError if it failed to run it, even after further requests."""
        request = {
            "code": program, "stdin": stdin, "language": self.language, "compile_timeout": _COMPILE_S,
            "run_timeout": limits.wall_s, "memory_limit_MB": limits.memory_bytes >> 20,
        }  # fmt: skip
        end_s = time.monotonic() + limits.wall_s + SERVICE_MARGIN_S
        for pause_s in (*PAUSES_S, math.inf):
            try:
                return self._asked(request, limits, end_s)
            except (OSError, ValueError, LookupError, AttributeError, SandboxDiedError) as error:
                if time.monotonic() + pause_s + limits.wall_s > end_s:  # no time for another try
                    raise SandboxDiedError(f"the sandbox service {self.url} ran no program: {error}") from error
                time.sleep(pause_s)
        raise AssertionError

    def check(self) -> None:
        """Run a trivial program. Raises ConfigError if the service does not answer, or does not know the language."""
        program = "print('found')" if self.language == "python" else ""
        try:
            ended = self.run(program)
        except SandboxDiedError as error:
            raise ConfigError(f"task.sandbox.url: {error}") from None
        if program and ended.output.strip() != "found":
            raise ConfigError(f"task.sandbox.url: {self.url} ran print('found') and returned {ended.output!r:.80}")

    def _asked(self, request: dict[str, Any], limits: RunLimits, end_s: float) -> Ended:
        data, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url.rstrip('/')}/run_code", data, headers)
        with urllib.request.urlopen(asked, timeout=end_s - time.monotonic()) as reply:
            found = json.loads(_read(reply, end_s, _MAX_CHARACTERS * limits.output_bytes + _REST_BYTES))
        runs = [found.get(name) for name in ("compile_result", "run_result") if found.get(name)]
        if found["status"] == "SandboxError" or not runs:
            raise SandboxDiedError(f"{found.get('message') or 'it gave no reason'}"[:300])
        last = runs[-1]  # a program that did not compile did not run
        code = last.get("return_code")
        return Ended(
            exit_code=1 if code is None else int(code), output=(last.get("stdout") or "")[: limits.output_bytes],
            errors=(last.get("stderr") or "")[: limits.output_bytes], is_late=last["status"] == "TimeLimitExceeded",
            cpu_s=float(last.get("execution_time") or 0),
        )  # fmt: skip


def _read(reply: HTTPResponse, end_s: float, max_bytes: int) -> bytes:
    """Return the body of a reply. Raises SandboxDiedError if it is longer than `max_bytes` or not complete by `end_s`.
    """
    body = bytearray()
    while chunk := reply.read1(1 << 16):
        body += chunk
        if len(body) > max_bytes:
            raise SandboxDiedError(f"its reply has more than {max_bytes} bytes")
        if time.monotonic() > end_s:
            raise SandboxDiedError("its reply did not come in time")
    return bytes(body)
