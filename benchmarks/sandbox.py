"""Measures programs in answers: answers and tests a second, processor time, and programs that misbehave side by side.

    python -m benchmarks.sandbox                                         # prints the tables
    python -m benchmarks.sandbox --out benchmarks/results/sandbox

Two tasks, each in bubblewrap and not contained, with one and with four answers at once, `--rounds` times. The table has
the medians. Processor time is the time of all processes together. Beside other work it says more than the rate.
    one input    an answer of configs/code_cpu.yaml: an expression in a program that reads one input
    ten calls    a function that is called ten times
Then 48 programs that misbehave, in 12 ways, beside 16 sound ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from async_rl.base.config.task_parts import SandboxConfig
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text, write_page
from rollout_server.question import Question
from rollout_server.rewards.code.checker import CodeChecker, CodeSettings, sandbox_of
from rollout_server.rewards.code.sandbox import Bubblewrap, Ended, RunLimits

SOLVE = """```python
from collections import Counter
def solve(words):
    count = Counter(words)
    best = sorted(count.items(), key=lambda kv: (-kv[1], kv[0]))
    return [[word, number] for word, number in best[:3]]
```"""
WORDS = ("the quick brown fox jumps over the lazy dog the fox " * 20).split()
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
MISDEED_LIMITS = RunLimits(cpu_s=1, wall_s=12.0, memory_bytes=256 << 20)


class Work(NamedTuple):
    """One task: the settings of the reward, a question's tests, and a right answer."""

    settings: CodeSettings
    tests: dict[str, Any]
    answer: str


def works() -> dict[str, Work]:
    """Return the tasks by their names."""
    wrap = "for x in map(int, input().split()):\n    print({answer})\n"
    one = {"inputs": ["2 7 9 12 20"], "outputs": ["4\n14\n18\n24\n40"]}
    given = [WORDS[first:] for first in range(10)]
    wanted = [sorted(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))[:3] for words in given]
    calls = {"fn_name": "solve", "inputs": [[each] for each in given], "outputs": list(map(json.dumps, wanted))}
    return {
        "one input": Work(CodeSettings(wrap=wrap), one, "x*2"),
        "ten calls": Work(CodeSettings(partial=True), calls, SOLVE),
    }


def measure(work: Work, kind: Any, at_once: int, seconds: float) -> tuple[float, float]:
    """Return the answers scored a second, and the milliseconds of processor time of each."""
    checker = CodeChecker(sandbox=sandbox_of(SandboxConfig(kind=kind)), settings=work.settings)
    question = Question(messages=(), ground_truth=work.tests)
    assert checker.score(question, work.answer).score == 1
    began_s, began_cpu_s = time.monotonic(), sum(os.times()[:4])

    def loop(_: int) -> int:
        done = 0
        while time.monotonic() < began_s + seconds:
            assert checker.score(question, work.answer).score == 1
            done += 1
        return done

    with ThreadPoolExecutor(at_once) as threads:
        done = sum(threads.map(loop, range(at_once)))
    return done / (time.monotonic() - began_s), (sum(os.times()[:4]) - began_cpu_s) / done * 1000


def rates(seconds: float, rounds: int) -> Table:
    """Return the table of all tasks and ways."""
    found: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, work in works().items():
            for kind in ("bubblewrap", "none"):
                for at_once in (1, 4):
                    found.setdefault((name, kind, at_once), []).append(measure(work, kind, at_once, seconds))
    rows = []
    for (name, kind, at_once), each in found.items():
        per_s, cpu_ms = (statistics.median(values) for values in zip(*each, strict=True))
        num_tests = 10 if name == "ten calls" else 1
        rows.append([name, kind, str(at_once), f"{per_s:.1f}", f"{per_s * num_tests:.1f}", f"{cpu_ms:.1f}"])
    header = ("task", "task.sandbox.kind", "at once", "answers/s", "tests/s", "processor time of an answer, ms")
    return Table(header, rows, "Answers a second")


def misdeeds() -> Table:
    """Return a table: what became of 48 programs that misbehave and 16 sound ones beside them, all at once."""
    programs = [*MISDEEDS.values()] * OF_EACH
    every = len(programs) // SOUND
    mixed = [(program, False) for program in programs]
    for number in range(SOUND):
        mixed.insert(number * (every + 1), ("print(sum(range(10)))", True))

    def run(program: str) -> Ended:
        with Bubblewrap().open() as run:
            return run(program, "", MISDEED_LIMITS)

    began_s = time.monotonic()
    with ThreadPoolExecutor(len(mixed)) as threads:
        ended = list(threads.map(run, [program for program, _ in mixed]))
    took_s = time.monotonic() - began_s
    left = psutil.Process().children(recursive=True)
    right = sum(each.output == "45\n" for each, (_, is_sound) in zip(ended, mixed, strict=True) if is_sound)
    held = [_was_held(each) for each, (_, is_sound) in zip(ended, mixed, strict=True) if not is_sound]
    opened = {name for name, was_held in zip([*MISDEEDS] * OF_EACH, held, strict=True) if not was_held}
    header = ("sound ones right", "misdeeds held", "not held", "processes left", "seconds")
    counts = [f"{right} of {SOUND}", f"{sum(held)} of {len(held)}", ", ".join(sorted(opened))]
    row = [*counts, str(len(left)), f"{took_s:.1f}"]
    return Table(header, [row], f"{len(held)} programs that misbehave beside {SOUND} sound ones")


def _was_held(ended: Ended) -> bool:
    """Return whether a misdeed came to nothing: it says so, was killed, or crashed."""
    return "OPEN" not in ended.output + ended.errors and ("held" in ended.output + ended.errors or ended.exit_code < 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each row in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the tables to this file, with .md and .json")
    arguments = parser.parse_args()
    tables = [rates(arguments.seconds, arguments.rounds), misdeeds()]
    text = "\n".join(f"## {table.title}\n\n{table.markdown()}" for table in tables)
    page = f"Programs in answers. {arguments.rounds} rounds. {machine_text()}.\n\n{text}"
    if arguments.out:
        numbers = [{"title": each.title, "header": each.header, "rows": each.rows} for each in tables]
        write_page(arguments.out, page, numbers)
    else:
        print(page)


if __name__ == "__main__":
    main()
