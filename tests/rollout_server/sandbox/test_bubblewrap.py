"""Bubblewrap: what it holds of all misdeeds, what stays open, and what works."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rollout_server.rewards.code.sandbox import Bubblewrap, Ended, Interpreter, RunLimits, SandboxDiedError
from tests.kit.sandbox import needs_bubblewrap
from tests.kit.sandbox.misdeeds import MISDEEDS, SOUND, TRY, exposed_host

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[3]
OPEN = {
    "much memory in several processes": {"600 MB of 512 MB"},  # the limit is of each process
    "full /tmp": {"inodes"},  # the bytes of /tmp are limited
    "much memory": {"files in memory", "size of a pipe"},  # at most 256 files of output_bytes
    "locks": {"flock", "record lock"},  # on what is below /usr
    "system calls": {
        "add_key", "fanotify", "inotify", "io_uring", "kcmp", "keyctl", "landlock", "memfd_create", "mq_open", "msgget",
        "perf", "personality", "semget", "shmget", "userfaultfd", "x32 getpid", "migrate_pages", "clone3", "bpf",
    },
}  # fmt: skip
"""[misdeed] what may be not held; of the system calls it depends on the kernel."""
OWN = {
    "network": {"udp", "bind", "netlink"}, "reads of others": {"read /"}, "ptrace": {"traceme"},
    "signals to others": {"signal 0 to the parent"}, "system calls": {"setuid 0", "descriptors"},
}  # fmt: skip
"""[misdeed] what a program may do because all that it reaches is its own."""
BUBBLEWRAP = Bubblewrap()
ENDLESS = {name for name in MISDEEDS if name.startswith("endless")}


def run(program: str, stdin: str = "7\n", sandbox: Bubblewrap = BUBBLEWRAP, **limits: float) -> Ended:
    with sandbox.open() as run:
        return run(program, stdin, RunLimits(**{"wall_s": 20.0, **limits}))  # type: ignore[arg-type]


@contextmanager
def nothing_is_left() -> Iterator[None]:
    """Fail if a process that was started in this block goes on after it; those of other tests don't count."""
    before = set(psutil.Process().children(recursive=True))
    yield
    started = [each for each in psutil.Process().children(recursive=True) if each not in before]
    _, alive = psutil.wait_procs(started, timeout=30)  # the kernel ends a sandbox's processes one after the other
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


@needs_bubblewrap
@pytest.mark.parametrize("name", MISDEEDS)
def test_a_misdeed_is_held_but_for_what_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "sesame")
    with exposed_host() as values, nothing_is_left():
        text = TRY + MISDEEDS[name]
        for word, value in values.items():
            text = text.replace(word, value)
        ended = run(text, wall_s=1.0 if name in ENDLESS else 20.0, cpu_s=5.0)
    lines = (ended.output + ended.errors).splitlines()
    was_open = {line.removeprefix("OPEN ").partition(":")[0] for line in lines if line.startswith("OPEN")}
    assert was_open <= OPEN.get(name, set()) | OWN.get(name, set()), lines
    assert ended.is_late == (name in ENDLESS) and len(ended.output) <= 1 << 20
    assert ended.is_late or was_open or any("held" in line for line in lines), ended


@needs_bubblewrap
def test_sound_programs_work() -> None:
    with BUBBLEWRAP.open() as run:
        for name, (program, last) in SOUND.items():
            ended = run(program, "7\n", RunLimits(wall_s=20.0, cpu_s=10.0))
            assert (ended.exit_code, ended.output.strip()) == (0, last), (name, ended)


@needs_bubblewrap
def test_programs_import_what_their_python_has_installed() -> None:
    text = "import numpy as np\nprint(np.arange(7).sum(), round(np.linalg.inv(np.eye(9)).trace()))"
    ended = run(text, cpu_s=20.0)
    assert ended.output == "21 9\n", ended


@needs_bubblewrap
def test_tests_of_one_answer_share_a_sandbox_and_no_state() -> None:
    with nothing_is_left(), Bubblewrap().open("import math\nshared = [math.pi]") as run:
        program = "prepared['shared'].append(1)\nimport math\nmath.e = input()\nprint(len(prepared['shared']), math.e)"
        assert [run(program, text).output for text in ("a", "b")] == ["2 a\n", "2 b\n"]
        assert run("import subprocess\nsubprocess.Popen(['sleep', '100'])\nprint(1)").output == "1\n"
        assert run("while True: pass", "", RunLimits(wall_s=0.3)).is_late
        assert "MemoryError" in run("x = bytearray(1 << 30)").errors
        assert run("import os\nos.kill(1, 9)\nos.kill(os.getppid(), 2)\nprint(7)").output == "7\n"
        assert run("import sys\nsys.exit(3)").exit_code == 3


@needs_bubblewrap
def test_a_sandbox_that_dies_is_replaced_by_the_next_run() -> None:
    with nothing_is_left():
        interpreter = Interpreter(Bubblewrap(), "")
        assert interpreter.run("print(1)").output == "1\n"
        assert interpreter.process
        for process in psutil.Process(interpreter.process.pid).children(recursive=True):
            process.kill()
        with pytest.raises(SandboxDiedError):
            interpreter.run("print(2)")
        assert interpreter.run("print(2)").output == "2\n"
        interpreter.close()
        with pytest.raises(SandboxDiedError), Bubblewrap().open("1 / 0") as run:
            run("print(3)")


@needs_bubblewrap
def test_a_sandbox_that_is_stopped_is_killed_with_all_its_processes() -> None:
    interpreter = Interpreter(Bubblewrap(), "")
    interpreter.run("print(1)")
    assert interpreter.process
    started = psutil.Process(interpreter.process.pid).children(recursive=True)
    started[-1].suspend()
    interpreter.close()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert [each for each in alive if each.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("is_contained", [pytest.param(True, marks=needs_bubblewrap), False])
def test_no_process_is_left_when_the_worker_is_killed(is_contained: bool) -> None:
    code = (
        "from rollout_server.rewards.code.sandbox import Bubblewrap, RunLimits\n"
        f"with Bubblewrap(is_contained={is_contained}).open() as run:\n"
        "    program = 'import subprocess, time; subprocess.Popen([\"sleep\", \"99\"]); time.sleep(99)'\n"
        "    run(program, '', RunLimits(wall_s=99))"
    )
    worker = psutil.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, cwd=ROOT)
    end_s = time.monotonic() + 60
    programs: list[psutil.Process] = []
    while "sleep" not in [each.name() for each in programs]:
        assert time.monotonic() < end_s, programs
        time.sleep(0.05)
        programs = worker.children(recursive=True)
    worker.kill()
    worker.wait()
    _, alive = psutil.wait_procs(programs, timeout=10)
    assert [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
