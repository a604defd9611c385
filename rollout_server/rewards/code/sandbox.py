"""Runs programs that a model wrote: in bubblewrap, or at a service like github.com/bytedance/SandboxFusion.

    with Bubblewrap().open(setup) as run:           one sandbox with one interpreter, for one answer
        ended = run(program, stdin, RunLimits())    a new process for each test, forked in the sandbox

In bubblewrap a program has no network, no files but libraries, limited resources, and a deadline. The interpreter
starts with the first run. If it dies, the next run starts another one.
"""

from __future__ import annotations

import itertools
import json
import marshal
import math
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

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
SERVICE_MARGIN_S = 10.0
"""How long a run at a service may last after its time limit, even if the service queues or fails."""
PAUSES_S = (1.0, 4.0)
"""The pauses before a failed request is sent again."""
FIRST_UID, NUM_UIDS = 60000, 4096
"""The user ids of programs if root runs the worker, because root is exempt from the limit of processes."""
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
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
    "--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom",
)  # fmt: skip
"""Some containers do not allow a new /proc and /dev; the two devices are those that Python needs."""
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
    """A sandbox could not be started, or died, or did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bubblewrap:
    """A configured kind of sandbox. `open` starts one.

    Args:
        is_contained: whether programs run in bubblewrap. If not, they have all rights of this user; time, memory and
            output are still limited.
    """

    is_contained: bool = True

    @contextmanager
    def open(self, setup: str = "") -> Iterator[Callable[..., Ended]]:
        """A context with a function that runs programs in one sandbox, see `Interpreter.run`.

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
        if not self.is_contained:
            return
        try:
            if not shutil.which("bwrap"):
                raise SandboxDiedError("bwrap is not installed")
            with self.open() as run:
                run("pass", limits=RunLimits(wall_s=START_TIMEOUT_S))
        except SandboxDiedError as error:
            raise ConfigError(f"task.sandbox: no program runs in bubblewrap here: {error}. {THREE_WAYS}") from None

    def command_line(self, user: int | None) -> list[str]:
        """Return the command that starts the interpreter in a sandbox.

        Args:
            user: the user id of programs, if root runs the worker; None: the worker's own.
        """
        libraries = [os.path.realpath(each) for each in site.getsitepackages() if os.path.isdir(each)]
        load = f"import marshal; exec(marshal.loads(bytes.fromhex('{_compiled()}')))"
        start = [os.path.realpath(sys.executable), "-I", "-S", "-c", load, ":".join(libraries)]
        if not self.is_contained:
            return start
        folders = [os.path.realpath(each) for each in (f"{sys.base_prefix}/bin", f"{sys.base_prefix}/lib", *libraries)]
        folders = [each for each in dict.fromkeys(folders) if not each.startswith("/usr/")]
        seen = [word for each in folders for word in ("--ro-bind-try", each, each)]
        inner = ["bwrap", *_FLAGS, *seen, "--remount-ro", "/", *start]
        if user is None:
            return inner
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        closed = {each: top for each in folders if (top := _closed_to_others(Path(each)))}
        if not closed:
            return [*as_user, *inner]
        # A user of its own can't enter /root, say: an outer bubblewrap of root shows it nothing but these folders.
        outer = ["bwrap", "--die-with-parent", "--dev-bind", "/", "/"]
        for top in dict.fromkeys(closed.values()):
            outer += ["--perms", "0755", "--tmpfs", str(top)]
        for each in closed:
            outer += ["--perms", "0755", "--dir", os.path.dirname(each), "--ro-bind", each, each]
        return [*outer, *as_user, *inner]


class Interpreter:
    """A sandbox with its interpreter process, which starts with the first run. Only one thread at a time may use it."""

    def __init__(self, sandbox: Bubblewrap, setup: str) -> None:
        self.sandbox, self.setup = sandbox, setup
        self.process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket

    def run(self, program: str, stdin: str = "", limits: RunLimits = DEFAULT_LIMITS) -> Ended:
        """Run a program until it ends or is late, and return its result.

        The call takes at most `limits.wall_s` + GRACE_S, even if it has to start the sandbox.

        Raises:
            SandboxDiedError: the sandbox did not start, died, or did not answer in time. The next run starts a new one.
        """
        end_s = time.monotonic() + limits.wall_s + GRACE_S
        if self.process is None:
            self.start(end_s)
        source, given = program.encode(errors="replace"), stdin.encode(errors="replace")
        numbers = " ".join(map(str, (len(source), len(given), *astuple(limits))))
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

    def close(self) -> list[str]:
        """End the sandbox: close its connection, upon which it ends by itself, with the program that it runs.

        Returns the lines that it wrote to standard error.
        """
        process, self.process = self.process, None
        if process is None:
            return []
        self._connection.close()
        try:
            errors = process.communicate(timeout=CLOSE_S)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # an outer bubblewrap may not signal the user of the inner one
            errors = b""
            with suppress(subprocess.TimeoutExpired):  # a program's own child may still have the pipe
                errors = process.communicate(timeout=CLOSE_S)[1]
        return errors.decode(errors="replace").strip().splitlines()

    def start(self, end_s: float = math.inf) -> None:
        """Start the interpreter and wait until its setup is done, until time `end_s`, but at most START_TIMEOUT_S.

        Raises:
            SandboxDiedError: it has failed, or is not ready by then.
        """
        end_s = min(end_s, time.monotonic() + START_TIMEOUT_S)
        user = FIRST_UID + next(_numbers) % NUM_UIDS if os.getuid() == 0 and self.sandbox.is_contained else None
        self._connection, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen(
                self.sandbox.command_line(user), stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.PIPE,
                env=_ENVIRONMENT, cwd="/", process_group=0,
            )
        except OSError as error:
            raise SandboxDiedError(f"a sandbox could not be started: {error}") from error
        finally:
            theirs.close()
        setup = self.setup.encode()
        self._send(b"%d\n%b" % (len(setup), setup), end_s)
        if self._read(_LINE, end_s).strip() != b"ready":
            raise self._death("could not be started")

    def _send(self, data: bytes, end_s: float) -> None:
        self._connection.settimeout(max(0.001, end_s - time.monotonic()))
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise self._death("did not read" if isinstance(error, TimeoutError) else "died") from None

    def _read(self, size: int, end_s: float) -> bytes:
        """Return `size` bytes from the interpreter, or fewer if it has ended.

        Raises:
            SandboxDiedError: the bytes have not come by time `end_s`.
        """
        found = bytearray()
        while len(found) < size:
            self._connection.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                part = self._connection.recv(size - len(found))
            except TimeoutError:
                raise self._death("did not answer") from None
            except OSError:
                break
            if not part:
                break
            found += part
        return bytes(found)

    def _death(self, what: str) -> SandboxDiedError:
        """End the failed sandbox, and return the error to raise: what has failed, and the sandbox's own last words."""
        lines = self.close()
        return SandboxDiedError(f"a sandbox {what}: {lines[-1]:.300}" if lines else f"a sandbox {what}")


_numbers = itertools.count(os.getpid() * 61)  # workers of one machine rarely use the same users


@cache
def _compiled() -> str:
    """Return the compiled code of the interpreter, in hexadecimal digits."""
    return marshal.dumps(compile(_INTERPRETER.read_text(), "interpreter.py", "exec")).hex()


def _closed_to_others(folder: Path) -> Path | None:
    """Return the outermost folder of a path, the path included, that not every user can enter; None if there is none.
    """
    above = (*reversed(folder.parents), folder)
    return next((each for each in above if each.exists() and not each.stat().st_mode & 1), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """Runs programs at the service at `url` by `POST /run_code`. The service contains them and limits their output."""

    url: str

    @contextmanager
    def open(self, setup: str = "") -> Iterator[Callable[..., Ended]]:
        """A context with the function that runs programs. Each run is a separate request."""
        yield self.run

    def run(self, program: str, stdin: str = "", limits: RunLimits = DEFAULT_LIMITS) -> Ended:
        """Run a program at the service. Raises SandboxDiedError if it failed to run it, even after further requests."""
        request = {
            "code": program, "stdin": stdin, "language": "python", "compile_timeout": 10.0,
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
        """Raise ConfigError if the service runs no program."""
        try:
            self.run("pass")
        except SandboxDiedError as error:
            raise ConfigError(f"task.sandbox.url: {error}") from None

    def _asked(self, request: dict[str, Any], limits: RunLimits, end_s: float) -> Ended:
        data, headers = json.dumps(request).encode(), {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url.rstrip('/')}/run_code", data, headers)
        with urllib.request.urlopen(asked, timeout=end_s - time.monotonic()) as reply:
            found = json.load(reply)
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
