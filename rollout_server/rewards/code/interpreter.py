"""The interpreter in a sandbox: it forks a process for each program that it reads, and replies how the program ended.

Its compiled code is passed to `python -c`, so it imports only the standard library, and nothing that starts slowly.

    request: a line with the lengths of the program and its input, and the limits of the run; the program; the input
    reply:   a line of 64 bytes with exit code, whether it was late, CPU seconds, lengths of output and errors; output;
             errors

An answer can change this process, for they run as the same user. It gains nothing: no expected result is in here.
"""

import _signal  # `signal` imports enum
import _sitebuiltins  # type: ignore[import-not-found]
import builtins
import gc
import os
import resource
import select
import sys

KILL, INTERRUPT, IGNORE = 9, 2, 1
requests, replies = open(0, "rb", closefd=False), open(1, "wb", closefd=False)  # noqa: SIM115
is_contained = os.getpid() == 1
sys.path += filter(None, sys.argv[1].split(":"))


def limit(wall_s: float, cpu_s: float, memory: float, output: float, processes: float) -> None:
    """Limit the resources of this process and its children. The limits can't be raised again."""
    limits = {
        resource.RLIMIT_FSIZE: output, resource.RLIMIT_AS: memory, resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(cpu_s + 1), resource.RLIMIT_NOFILE: 256,
    }  # fmt: skip
    if is_contained:  # the processes of a sandbox are counted by themselves
        limits[resource.RLIMIT_NPROC] = processes
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = int(most if hard == resource.RLIM_INFINITY else min(most, hard))
        resource.setrlimit(kind, (most, most))


def execute(program: bytes) -> int:
    """Run Python as `__main__` and return its exit code."""
    sys.stdin = os.fdopen(0, "r", encoding="utf-8", errors="replace")
    sys.stdout = output = os.fdopen(1, "w", encoding="utf-8", errors="replace")
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="replace")
    for name in ("stdin", "stdout", "stderr"):
        setattr(sys, f"__{name}__", getattr(sys, name))
    sys.argv = ["answer.py"]
    main = type(sys)("__main__")
    main.__dict__.update(__builtins__=builtins, prepared=prepared)
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(program, "answer.py", "exec"), main.__dict__)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    try:  # as where Python itself ends a program
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr, output):
            if stream is not None and not getattr(stream, "closed", False):
                stream.flush()
    except ValueError:  # the program has detached its output
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = code or 1
    return code & 255


def run_in_child(program: bytes, files: list[int], limits: list[float]) -> None:
    """Run a program in this child process of the interpreter, and exit."""
    exit_now, code = os._exit, 1  # a program may change `os`
    try:
        os.setsid()
        for target, each in enumerate(files):
            os.dup2(each, target)
        os.closerange(3, 256)
        limit(*limits)
        code = execute(program)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        exit_now(code)


def end_all(child: int) -> None:
    """Kill a child process and all that it has started. Without bubblewrap, processes that left its group survive."""
    try:  # noqa: SIM105  # contextlib starts slowly
        os.kill(-1, KILL) if is_contained else os.killpg(child, KILL)
    except ProcessLookupError:
        pass


def write(line: bytes, data: bytes = b"") -> None:
    """Write a reply: its line, padded to 64 bytes, and the data."""
    replies.write(line.ljust(63) + b"\n" + data)
    replies.flush()


def run(program: bytes, given: bytes, limits: list[float]) -> None:
    """Run a program in a child process until it ends or is late, kill its child processes, and write the reply."""
    files = [os.memfd_create(name) for name in ("input", "output", "errors")]  # so that the kernel bounds them
    os.write(files[0], given)
    os.lseek(files[0], 0, 0)
    child = os.fork()
    if child == 0:
        run_in_child(program, files, limits)
    ended, poll = os.pidfd_open(child), select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(0, 0)  # says when nobody waits for the reply any more
    found = poll.poll(limits[0] * 1000)
    if any(each == 0 for each, _ in found):
        end_all(child)
        os._exit(1)
    if not found:
        os.kill(child, KILL)
    status, used = os.wait4(child, 0)[1:]
    end_all(child)
    try:
        while is_contained:
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
    os.close(ended)
    output, errors = (os.pread(each, int(limits[3]), 0) for each in files[1:])
    for each in files:
        os.close(each)
    code, cpu_s = os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
    write(b"%d %d %f %d %d" % (code, not found, cpu_s, len(output), len(errors)), output + errors)


def read_lines() -> "list[float]":
    """Return the numbers in the next line of requests; [] at the end of input."""
    return [float(each) if "." in each else int(each) for each in requests.readline().decode().split()]


_signal.signal(INTERRUPT, IGNORE)
for name in ("exit", "quit"):  # which -S leaves out
    setattr(builtins, name, _sitebuiltins.Quitter(name, ""))
prepared: dict[str, object] = {}
exec(compile(requests.read(*map(int, read_lines())), "prepared.py", "exec"), prepared)
gc.freeze()
write(b"ready")
while numbers := read_lines():
    length, given_length, *limits_of_run = numbers
    run(requests.read(int(length)), requests.read(int(given_length)), limits_of_run)
os._exit(0)
