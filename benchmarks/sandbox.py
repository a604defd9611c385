"""Measures the sandbox against a bare subprocess of the same program: runs a second, processor time, memory, misdeeds.

    python -m benchmarks.sandbox                                         # prints the tables
    python -m benchmarks.sandbox --out benchmarks/results/sandbox

The rows are measured in turn, `--rounds` times, and the table has their medians. Processor time is that of all
processes together; on a machine that has other work it says more than the rate.
    subprocess    `python -I -S program`, a process of its own for each run
    fork server   seccomp, Landlock and limits
    namespaces    the same with namespaces of its own for each run
Then 48 programs that misbehave, in 12 ways, beside 16 sound ones, all at once; the memory of the pool while 20 programs
sleep, beside that of 20 subprocesses; and the processes that are left when a worker is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import psutil

from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.tables import Table, write_page
from rollout_server.sandbox.fork_server import PROJECT
from rollout_server.sandbox.pool import Ended, RunLimits, SandboxPool
from rollout_server.sandbox.protection import find_protection, find_python
from rollout_server.sandbox.subprocesses import Uncontained

PROGRAM = """import sys
from collections import Counter
def solve(words):
    count = Counter(words)
    best = sorted(count.items(), key=lambda kv: (-kv[1], kv[0]))
    return best[:3]
data = sys.stdin.read().split()
total = sum(len(word) for word in data)
for word, number in solve(data):
    print(word, number, total)
"""
STDIN = "the quick brown fox jumps over the lazy dog the fox " * 20
MISDEEDS = {
    "fork bomb": """import os, time
n = 0
try:
    for _ in range(300):
        if os.fork() == 0: time.sleep(1); os._exit(0)
        n += 1
except OSError: pass
print("held" if n < 64 else "OPEN", n)
""",
    "daemon": """import os, time
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0: time.sleep(60)
        os._exit(0)
except OSError: pass
print("held")  # it must be gone when all have ended
""",
    "endless loop": "while True: pass",
    "endless sleep that ignores signals": """import signal, time
for number in range(1, 32):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: time.sleep(10)
""",
    "much memory": """import mmap
try: mmap.mmap(-1, 10 << 30); print("OPEN")
except OSError: print("held")
""",
    "much memory in small parts": """parts = []
try:
    while len(parts) < 10240: parts.append(b"x" * (1 << 20))
    print("OPEN")
except MemoryError:
    parts.clear()
    print("held")
""",
    "threads": """import os, sys, threading
threading.stack_size(32768); event = threading.Event(); n = 0
try:
    while n < 1000: threading.Thread(target=event.wait, daemon=True).start(); n += 1
except BaseException: pass
print("held" if n < 200 else "OPEN"); sys.stdout.flush(); os._exit(0)
""",
    "1 GB of output": """import os
try:
    for _ in range(1024): os.write(1, b"x" * (1 << 20))
    os.write(2, b"OPEN")
except OSError: os.write(2, b"held")
""",
    "full /tmp": """try:
    for n in range(100): open(f"/tmp/{n}", "wb").write(b"x" * (900 << 10))
    print("OPEN")
except OSError: print("held")
""",
    "many files": """try:
    for n in range(20000): open(f"/tmp/{n}", "w").close()
    print("OPEN")
except OSError: print("held")
""",
    "signals to all": """import os, signal
for process in (-1, os.getppid()):
    try: os.kill(process, signal.SIGTERM)
    except OSError: pass
print("held")  # the others go on
""",
    "crash": "import ctypes\nctypes.string_at(0)",
}
"""Programs that misbehave: each says whether it was held, is killed, or crashes."""
OF_EACH = 4
"""How many programs of each misdeed run at once."""
SOUND = 16
MISDEED_MEMORY_BYTES = 256 << 20
SLEEPERS = 20
KILLED_RUNS = 8


class Way(NamedTuple):
    """A way to run a program."""

    name: str
    run: Callable[[str, str, RunLimits], Awaitable[object]]
    server: Callable[[], int]
    """Returns the process of the fork server, or 0."""


class Rate(NamedTuple):
    """How fast a way ran the program."""

    per_s: float
    median_ms: float
    cpu_ms: float


async def measure(way: Way, seconds: float, at_once: int) -> Rate:
    """Return how often a way runs the program for so long, with so many at once."""
    times: list[float] = []
    await way.run(PROGRAM, STDIN, RunLimits())
    began_s, cpu_s = time.monotonic(), _cpu_s(way.server())
    end_s = began_s + seconds

    async def loop() -> None:
        while time.monotonic() < end_s:
            start_s = time.monotonic()
            ended = await way.run(PROGRAM, STDIN, RunLimits())
            times.append(time.monotonic() - start_s)
            assert getattr(ended, "output", "").startswith("the "), ended

    await asyncio.gather(*(loop() for _ in range(at_once)))
    cpu_s = _cpu_s(way.server()) - cpu_s
    took_s = time.monotonic() - began_s
    return Rate(len(times) / took_s, statistics.median(times) * 1000, cpu_s / len(times) * 1000)


def _cpu_s(server: int) -> float:
    """Return the processor time of this process, of a server, and of all their children that have ended."""
    times = os.times()
    total = times.user + times.system + times.children_user + times.children_system
    for process in _servers(server) if server else ():
        used = process.cpu_times()
        total += used.user + used.system + used.children_user + used.children_system
    return total


def _servers(server: int) -> list[psutil.Process]:
    """Return the processes of a pool that runs no program: with namespaces the server is a child of the one started."""
    return [psutil.Process(server), *psutil.Process(server).children()]


async def rates(seconds: float, rounds: int) -> Table:
    """Return the table of all ways, with one and with four programs at once."""
    python = find_python()
    plain, forked, spaced = Uncontained([python, "-I", "-S"]), SandboxPool(), SandboxPool(has_namespaces=True)
    ways = [Way("subprocess", plain.run, lambda: 0), Way("fork server", forked.run, lambda: forked.server_pid)]
    if find_protection().has_namespaces:
        ways.append(Way("namespaces", spaced.run, lambda: spaced.server_pid))
    found: dict[tuple[str, int], list[Rate]] = {}
    for _ in range(rounds):
        for at_once in (1, 4):
            for way in ways:
                found.setdefault((way.name, at_once), []).append(await measure(way, seconds, at_once))
    await forked.aclose()
    await spaced.aclose()
    medians = {key: Rate(*map(statistics.median, zip(*each, strict=True))) for key, each in found.items()}
    rows = [
        [
            name, str(at_once), f"{rate.per_s:.1f}", f"{rate.per_s / medians['subprocess', at_once].per_s:.1f}",
            f"{rate.median_ms:.1f}", f"{rate.cpu_ms:.1f}",
        ]
        for (name, at_once), rate in medians.items()
    ]  # fmt: skip
    header = ("way", "at once", "runs/s", "times a subprocess", "median, ms", "processor time of a run, ms")
    return Table(header, rows, "Runs a second")


async def misdeeds(has_namespaces: bool, wall_s: float = 12.0) -> list[str]:
    """Return a row: what became of 48 programs that misbehave and 16 sound ones beside them, all at once."""
    pool = SandboxPool(has_namespaces=has_namespaces)
    programs = [*MISDEEDS.values()] * OF_EACH
    limits = RunLimits(
        cpu_s=1, wall_s=wall_s, processes=8 if has_namespaces else 1, memory_bytes=MISDEED_MEMORY_BYTES
    )
    every = len(programs) // SOUND
    mixed = [(program, False) for program in programs]
    for number in range(SOUND):
        mixed.insert(number * (every + 1), ("print(sum(range(10)))", True))
    began_s = time.monotonic()
    ended = await asyncio.gather(*(pool.run(program, limits=limits) for program, _ in mixed))
    took_s = time.monotonic() - began_s
    left = psutil.Process(pool.server_pid).children(recursive=True)[has_namespaces:]
    right = sum(each.output == "45\n" for each, (_, is_sound) in zip(ended, mixed, strict=True) if is_sound)
    held = sum(_was_held(each) for each, (_, is_sound) in zip(ended, mixed, strict=True) if not is_sound)
    bombs = [each for each, (program, _) in zip(ended, mixed, strict=True) if program == MISDEEDS["fork bomb"]]
    children = max(int((each.output.split() or ["", "0"])[-1]) for each in bombs)
    await pool.aclose()
    name = "namespaces" if has_namespaces else "fork server"
    return [
        name, f"{right} of {SOUND}", f"{held} of {len(programs)}", str(children), str(len(left)), f"{took_s:.1f}"
    ]


def _was_held(ended: Ended) -> bool:
    """Return whether a misdeed came to nothing: it says so, was killed, or crashed."""
    return "OPEN" not in ended.output + ended.errors and ("held" in ended.output + ended.errors or ended.exit_code < 0)


async def memory(has_namespaces: bool) -> list[str]:
    """Return a row: the memory of a pool alone, and with programs that sleep."""
    pool = SandboxPool(has_namespaces=has_namespaces)
    await pool.run("pass")
    server = psutil.Process(pool.server_pid)
    alone = sum(process.memory_full_info().uss for process in _servers(pool.server_pid))
    sleeping = [asyncio.create_task(pool.run("import time\ntime.sleep(3)")) for _ in range(SLEEPERS)]
    await asyncio.sleep(1.5)
    together = sum(process.memory_full_info().pss for process in (server, *server.children(recursive=True)))
    await asyncio.gather(*sleeping)
    await pool.aclose()
    name = "namespaces" if has_namespaces else "fork server"
    return [name, f"{alone / 2**20:.1f}", f"{together / 2**20:.1f}"]


async def memory_of_processes() -> list[str]:
    """Return a row: the memory of as many programs that sleep, each a process of its own."""
    command = [find_python(), "-I", "-S", "-c", "import time\ntime.sleep(60)"]
    processes = [psutil.Popen(command) for _ in range(SLEEPERS)]
    await asyncio.sleep(1.5)
    together = sum(process.memory_full_info().pss for process in processes)
    for process in processes:
        process.kill()
        process.wait()
    return ["subprocess", "", f"{together / 2**20:.1f}"]


def left_behind(has_namespaces: bool) -> list[str]:
    """Return a row: how many processes are left five seconds after a worker with running programs was killed."""
    code = (
        f"import asyncio, sys; sys.path.insert(0, {PROJECT!r})\n"
        "from rollout_server.sandbox.pool import SandboxPool\n"
        "async def main():\n"
        f"    pool = SandboxPool(has_namespaces={has_namespaces})\n"
        "    await pool.run('pass')\n"
        f"    runs = [asyncio.create_task(pool.run('while True: pass')) for _ in range({KILLED_RUNS})]\n"
        "    print(pool.server_pid, flush=True)\n"
        "    await asyncio.gather(*runs)\n"
        "asyncio.run(main())\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    server = psutil.Process(int(worker.stdout.readline()))
    deadline_s = time.monotonic() + 10
    while len(server.children(recursive=True)) < KILLED_RUNS + has_namespaces and time.monotonic() < deadline_s:
        time.sleep(0.05)
    processes = [server, *server.children(recursive=True)]
    worker.kill()
    worker.wait()
    _, alive = psutil.wait_procs(processes, timeout=5)
    left = [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    return ["namespaces" if has_namespaces else "fork server", str(len(processes)), str(len(left))]


async def measured(seconds: float, rounds: int) -> list[Table]:
    modes = (False, True) if find_protection().has_namespaces else (False,)
    return [
        await rates(seconds, rounds),
        Table(
            ("way", "sound ones right", "misdeeds held", "most children of a bomb", "processes left", "seconds"),
            [await misdeeds(mode) for mode in modes],
            f"{OF_EACH * len(MISDEEDS)} programs that misbehave, {OF_EACH} of each kind, beside {SOUND} sound ones",
        ),
        Table(
            ("way", "server alone, MiB of its own", f"with {SLEEPERS} programs, MiB"),
            [*[await memory(mode) for mode in modes], await memory_of_processes()], "Memory of the pool",
        ),
        Table(
            ("way", "processes", "left after 5 s"), [left_behind(mode) for mode in modes],
            "A worker is killed with SIGKILL",
        ),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each row in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the tables to this file, with .md and .json")
    arguments = parser.parse_args()
    tables = asyncio.run(measured(arguments.seconds, arguments.rounds))
    text = "\n".join(f"## {table.title}\n\n{table.markdown()}" for table in tables)
    page = f"The sandbox: {find_protection()}. {arguments.rounds} rounds. {machine_text()}.\n\n{text}"
    if arguments.out:
        numbers = [{"title": each.title, "header": each.header, "rows": each.rows} for each in tables]
        write_page(arguments.out, page, numbers)
    else:
        print(page)


if __name__ == "__main__":
    main()
