"""The fork server: it runs programs in processes that it forks and contains, and tells how each ended.

It is started under any Python from 3.10 on, with an empty environment, and imports only the standard library: what it
has in memory, its programs have too. A message has the limits of a run as JSON, and four descriptors: the program, its
input, its output and its errors, which are files in memory, so that nobody has to pump pipes.
"""

from __future__ import annotations

import atexit
import gc
import heapq
import json
import os
import select
import signal
import site
import socket
import sys
import time
import traceback
from contextlib import suppress

from rollout_server.sandbox import kernel, namespaces

FIRST_UID, NUM_UIDS = 60000, 4096
"""The users as which the programs of a server of root run, one for each program that runs."""
THREADS = 64
"""The most threads of a program."""
STARTED = b"ready"
_CHECKS_PARENT_EVERY_S = 1.0
_READABLE = ("/usr", "/lib", "/lib64", "/bin", "/dev/urandom", "/etc/localtime")
_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/dev/urandom", "/etc/localtime")
"""The paths for programs that read as root: a run may lie below /usr, or beside the `lib` of a Python."""
_PRELOADED = (
    "bisect", "collections", "datetime", "functools", "heapq", "itertools", "json", "math", "operator", "random", "re",
    "string", "typing",
)  # fmt: skip
"""Modules that most programs import; the server imports them once."""
_SMALL_FILES = 256
"""Descriptors of the server are below this number."""


class ForkServer:
    """Forks and ends programs, as the process at the other end of `control` asks for, until that ends.

    Args:
        has_namespaces: whether each program gets namespaces of its own.
        is_contained: whether programs are contained at all. Otherwise only their time, memory and output are limited.
        reads_as_root: whether programs may read nothing but libraries, and those of a server of root also where they
            are closed to others.
    """

    def __init__(
        self, control: int, *, has_namespaces: bool, is_contained: bool = True, reads_as_root: bool = False
    ) -> None:
        self._control = socket.socket(fileno=control)
        self._has_namespaces = has_namespaces
        self._is_contained, self._reads_as_root = is_contained, reads_as_root
        self._is_root = os.getuid() == 0
        self._pid, self._parent = os.getpid(), os.getppid()
        paths = [*_READABLE, sys.prefix, sys.base_prefix]
        if reads_as_root:
            paths = [*_LIBRARIES, *(os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix))]
        self._readable = [*paths, *filter(os.path.isdir, sys.path)]
        self._ruleset = kernel.landlock_ruleset(self._readable, ["/dev/null"]) if is_contained else -1
        self._running: dict[int, tuple[int, int]] = {}
        """[process] (number of the run, slot)."""
        self._processes: dict[int, int] = {}
        """[number of the run] its process."""
        self._deadlines: list[tuple[float, int]] = []
        self._late: set[int] = set()
        self._failed: dict[int, str] = {}
        """[number of the run] why its program could not be contained."""
        first = os.getpid() * 61  # servers of one machine rarely use the same users
        self._free_slots = [(first + number) % NUM_UIDS for number in range(NUM_UIDS)][::-1]
        self._read_failures, self._failures = os.pipe()
        """The pipe in which children say why they can't be contained. Programs do not have it."""
        os.set_blocking(self._read_failures, False)
        self._threads_of_user = (0.0, 0)
        """(until when it may be used, the number of threads of this user)."""

    def serve(self) -> None:
        """Serve until the other end of the control socket is closed, or the parent has ended; then end all programs."""
        wake, wakened = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(wakened, False)
        signal.set_wakeup_fd(wakened)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        self._control.send(STARTED)
        while os.getppid() == self._parent:
            next_s = min(self._deadlines[0][0] - time.monotonic() if self._deadlines else 60, _CHECKS_PARENT_EVERY_S)
            ready = [file for file, _ in poll.poll(max(0, next_s) * 1000 + 1)]
            self._end_late()
            if wake in ready:
                with suppress(BlockingIOError):
                    os.read(wake, 4096)
            if self._control.fileno() in ready and not self._start():
                break
            self._reap()
        for process in self._running:
            os.kill(process, signal.SIGKILL)

    def _start(self) -> bool:
        """Start the program of the next message; return False if there is none any more."""
        message, files, *_ = socket.recv_fds(self._control, 4096, 4)
        if not message:
            return False
        spec = json.loads(message)
        slot = self._free_slots.pop()
        threads = self._num_threads() + THREADS
        process = namespaces.fork() if self._has_namespaces else os.fork()
        if process == 0:
            exit_now, code = os._exit, 1  # a program may change `os`
            try:
                self._contain(spec, files, slot, threads)
                code = execute(files[0])
            finally:
                exit_now(code)
        for file in files:
            os.close(file)
        self._running[process] = spec["run"], slot
        self._processes[spec["run"]] = process
        heapq.heappush(self._deadlines, (time.monotonic() + spec["wall_s"], spec["run"]))
        return True

    def _contain(self, spec: dict[str, float], files: list[int], slot: int, threads: int) -> None:
        """Contain this process, a child of the server, for good, and close all that it shares with the server."""
        try:
            self._try_to_contain(spec, files, slot, threads)
        except BaseException as error:
            os.write(self._failures, f"{spec['run']} {error!r:.300}\n".encode())
            raise
        os.closerange(3, _SMALL_FILES)

    def _try_to_contain(self, spec: dict[str, float], files: list[int], slot: int, threads: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for target, file in enumerate(files[1:]):
            os.dup2(file, target)
        os.dup2(files[0], files[0] + _SMALL_FILES)
        files[0] += _SMALL_FILES
        if self._is_root and self._is_contained:
            kernel.become_user(FIRST_UID + slot, reads_as_root=self._reads_as_root)
            threads = THREADS
        num_processes = int(spec["processes"]) if self._has_namespaces else 1
        ruleset = self._ruleset
        if not self._has_namespaces:  # else the end of the server, process 1 of its namespace, ends all below it
            kernel.die_with_parent()
            if os.getppid() != self._pid:
                raise ProcessLookupError("the server has ended")
        else:
            namespaces.enter()
            os.chdir("/tmp")
            threads = num_processes + 16 if num_processes > 1 else THREADS  # counted within these namespaces
            ruleset = kernel.landlock_ruleset(self._readable, ["/dev/null", "/tmp"])  # this /tmp is another one
        kernel.set_dumpable(False)
        kernel.limit_resources(int(spec["memory_bytes"]), int(spec["output_bytes"]), spec["cpu_s"], threads)
        if self._is_contained:
            kernel.restrict_by_landlock(ruleset)
            kernel.apply_filter(kernel.seccomp_filter(os.getpid(), num_processes > 1))

    def _num_threads(self) -> int:
        """Return how many threads the user has, at most a second ago. Root has a user for each program instead."""
        until_s, number = self._threads_of_user
        if self._is_root or self._has_namespaces or time.monotonic() < until_s:
            return number
        number = 0
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                if os.stat(f"/proc/{name}").st_uid == os.getuid():
                    number += len(os.listdir(f"/proc/{name}/task"))
        self._threads_of_user = time.monotonic() + 1.0, number
        return number

    def _end_late(self) -> None:
        now_s = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            run = heapq.heappop(self._deadlines)[1]
            if run in self._processes:
                self._late.add(run)
                os.kill(self._processes[run], signal.SIGKILL)  # as process 1 of a namespace it ends all others there

    def _reap(self) -> None:
        """Tell how programs have ended: [run, exit code, whether it was late, CPU seconds, most memory in kB, error].

        The error is empty unless the program could not be contained, and was not run.
        """
        while self._running:
            process, status, usage = os.wait4(-1, os.WNOHANG)
            if not process:
                return
            run, slot = self._running.pop(process)
            del self._processes[run]
            self._free_slots.append(slot)
            used_s = usage.ru_utime + usage.ru_stime
            code, error = os.waitstatus_to_exitcode(status), self._failure(run) if status else ""
            told = [run, code, run in self._late, used_s, usage.ru_maxrss, error]
            self._late.discard(run)
            with suppress(OSError):  # the other end has gone
                self._control.send(json.dumps(told).encode())


    def _failure(self, run: int) -> str:
        """Return why the program of a run could not be contained; "" if it was."""
        with suppress(BlockingIOError):
            for line in os.read(self._read_failures, 1 << 16).decode(errors="replace").splitlines():
                number, _, error = line.partition(" ")
                self._failed[int(number)] = error
        return self._failed.pop(run, "")


def execute(file: int) -> int:
    """Run the program in a file as `__main__` and return its exit code."""
    source = os.pread(file, os.fstat(file).st_size, 0)
    os.close(file)
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", errors="replace")
    sys.stdout = output = os.fdopen(1, "w", encoding="utf-8", errors="replace")
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="replace")
    for name in ("stdin", "stdout", "stderr"):  # so that a file stays open when a program gives its name to another one
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.argv, sys.path = ["answer.py"], [path for path in sys.path if path != PROJECT]
    main = type(sys)("__main__")
    main.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = main
    for name in [name for name in sys.modules if name.partition(".")[0] == "rollout_server"]:
        del sys.modules[name]
    code = 0
    try:
        exec(compile(source, "answer.py", "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc(limit=-8)
        code = 1
    try:  # as where Python itself ends a program
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc(limit=-8)
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
        except BaseException:
            code = code or 1
    with suppress(ValueError):  # the program has closed or detached it
        output.flush()
    return code & 255


PROJECT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
"""The folder of the packages of this project, which programs can't import."""


def prepare(source: str) -> None:
    """Run a program in this process, once, whose names the programs to come can import from the module `prepared`."""
    module = type(sys)("prepared")
    exec(compile(source, "prepared.py", "exec"), module.__dict__)
    sys.modules["prepared"] = module


def main() -> None:
    """Serve: `fork_server.main()` with the arguments control socket, and the options of the pool as JSON."""
    control, options = int(sys.argv[1]), json.loads(sys.argv[2])
    if options["has_namespaces"]:
        namespaces.become_server()
    sys.path[:] = [path for path in sys.path if path != PROJECT]
    site.setquit()  # exit and quit, which Python leaves out with -S
    for name in (*_PRELOADED, *options["preload"]):
        __import__(name)
    if options["setup"]:
        prepare(options["setup"])
    gc.collect()
    gc.freeze()
    ForkServer(
        control, has_namespaces=options["has_namespaces"], is_contained=options["is_contained"],
        reads_as_root=options["reads_as_root"],
    ).serve()  # fmt: skip
