"""Every misdeed is held in every way in which the sandbox can run, and costs its program alone."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from async_rl.errors import AsyncRLError
from rollout_server.sandbox import kernel
from rollout_server.sandbox.fork_server import PROJECT
from rollout_server.sandbox.pool import Ended, RunLimits, SandboxPool
from tests.kit.sandbox.hosts import (
    IS_ROOT,
    MODES,
    OLD_MODES,
    ORDINARY_UID,
    PYTHON,
    Mode,
    exposed_host,
    pool_of,
    processes_of_programs,
    python_with,
)  # fmt: skip
from tests.kit.sandbox.misdeeds import MISDEEDS, OF_ITS_PYTHON, SOUND, SOUND_IN_NAMESPACES, SOUND_WITH_NUMPY, TRY

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(kernel.landlock_abi() < 1, reason="this kernel has no Landlock"),
    pytest.mark.skipif(not os.path.exists(PYTHON), reason=f"there is no {PYTHON}"),
]


def in_mode(mode: Mode, *values: str, is_nightly: bool = False) -> Any:
    marks = [pytest.mark.skipif(not mode.is_possible, reason="needs root"), *[pytest.mark.nightly] * is_nightly]
    return pytest.param(mode, *values, id="-".join((*values, mode.name)), marks=marks)


modes = pytest.mark.parametrize("mode", [in_mode(mode) for mode in MODES])
BY_LANDLOCK = (
    "network", "writes outside", "reads of others", "looks at other processes", "symlinks", "signals to the server",
    "ptrace",
)  # fmt: skip
"""The misdeeds that Landlock helps to hold."""
ABOUT_FILES = {"stat of a file of the run", "stat of a file of the host", "where a link points"}
OPEN = {
    False: {
        "stat of others": {*ABOUT_FILES, "stat of a file in /tmp"}, "locks": {"flock", "record lock"},
        "looks at other processes": {"group", "session", "priority", "processors", "processor time"},
    },
    True: {
        "stat of others": ABOUT_FILES, "locks": {"flock", "record lock"},
        "much memory in several processes": {"600 MB of 512 MB"},  # the limit is that of each process
    },
}  # fmt: skip
"""[whether programs have namespaces] [misdeed] what is not held."""
ENDLESS = {name for name in MISDEEDS if name.startswith("endless")}


def in_pool(mode: Mode, use: Callable[[SandboxPool], Awaitable[None]], **settings: Any) -> None:
    async def run(pool: SandboxPool) -> None:
        try:
            await use(pool)
        finally:
            await pool.aclose()

    with pool_of(mode, **settings) as pool:
        asyncio.run(run(pool))
    assert processes_of_programs(pool) == set()


def limits_of(mode: Mode, **limits: float) -> RunLimits:
    return RunLimits(**{"wall_s": 4.0, "cpu_s": 2.0, "processes": 8 if mode.has_namespaces else 1, **limits})  # type: ignore[arg-type]


@pytest.mark.parametrize(("mode", "name"), [
    *(in_mode(mode, name) for mode in MODES for name in MISDEEDS),
    *(
        in_mode(mode, name, is_nightly=mode.has_namespaces or name not in BY_LANDLOCK)
        for mode in OLD_MODES for name in MISDEEDS
    ),
])  # fmt: skip
def test_a_misdeed_is_held_and_the_next_program_runs(mode: Mode, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "sesame")
    wall_s = 0.5 if name in ENDLESS else 30.0

    async def misbehave(pool: SandboxPool) -> None:
        assert (await pool.run("print('alive')")).output == "alive\n"
        with exposed_host() as values:
            text = TRY + MISDEEDS[name]
            values |= {"PARENT": str(pool.server_pid), "HAS_NAMESPACES": str(mode.has_namespaces)}
            for word, value in values.items():
                text = text.replace(word, value)
            began_s = time.monotonic()
            ended = await pool.run(text, limits=limits_of(mode, wall_s=wall_s))
            check(name, mode, ended, time.monotonic() - began_s)
        server = pool.server_pid
        assert (await pool.run("print('alive')")).output == "alive\n" and pool.server_pid == server
        await asyncio.sleep(0.05)
        assert processes_of_programs(pool) == set()

    in_pool(mode, misbehave)


def check(name: str, mode: Mode, ended: Ended, took_s: float) -> None:
    lines = (ended.output + ended.errors).splitlines()
    if name in ENDLESS:
        assert ended.is_late and ended.exit_code == -signal.SIGKILL and took_s < 10
        return
    assert not ended.is_late and len(ended.output) <= 1 << 20
    was_open = {line.removeprefix("OPEN ").partition(":")[0] for line in lines if line.startswith("OPEN")}
    assert was_open == OPEN[mode.has_namespaces].get(name, set()), lines
    assert was_open or any("held" in line for line in lines), ended


@pytest.mark.parametrize("mode", [
    in_mode(MODES[2]), in_mode(MODES[3]), in_mode(OLD_MODES[0]), in_mode(OLD_MODES[1], is_nightly=True),
])  # fmt: skip
def test_the_files_of_its_python_stay_as_they_are_although_they_are_its_users(mode: Mode) -> None:
    async def change(pool: SandboxPool) -> None:
        before = module.stat()
        ended = await pool.run(TRY + OF_ITS_PYTHON, limits=limits_of(mode))
        assert ended.output.count("held ") == OF_ITS_PYTHON.count("\nt(") and "OPEN" not in ended.output, ended
        assert module.stat() == before

    with python_with() as python:
        module = Path(python).parents[1] / "module.py"
        module.write_text("sesame")
        os.chown(module, ORDINARY_UID if IS_ROOT else -1, -1)
        in_pool(mode, change, python=python, preload=["json"])  # with modules to import Python reads its pyvenv.cfg


@modes
def test_sound_programs_work(mode: Mode) -> None:
    async def work(pool: SandboxPool) -> None:
        for program, last in (SOUND | (SOUND_IN_NAMESPACES if mode.has_namespaces else {})).values():
            ended = await pool.run(program, "7\n", limits_of(mode, wall_s=20, cpu_s=10))
            assert (ended.exit_code, ended.output.strip()) == (0, last), ended

    in_pool(mode, work)


@pytest.mark.skipif(not IS_ROOT, reason="needs root")
@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.is_ordinary], ids=lambda mode: mode.name)
def test_programs_of_root_at_once_have_a_user_each(mode: Mode) -> None:
    program = "import os, time\nprint(os.getuid(), os.geteuid(), os.getgid())\ntime.sleep(1)"

    async def at_once(pool: SandboxPool) -> None:
        ended = await asyncio.gather(*(pool.run(program, limits=limits_of(mode)) for _ in range(2)))
        first, second = (set(map(int, each.output.split())) for each in ended)
        assert len(first) == len(second) == 1 and first != second and 0 not in first | second

    in_pool(mode, at_once)


def is_of_this_version() -> bool:
    told = subprocess.run([PYTHON, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True)
    return told.stdout.strip() == str(sys.version_info[:2])


@pytest.mark.parametrize("mode", MODES[:1] + MODES[2:4], ids=lambda mode: mode.name)
def test_programs_work_with_numpy_that_the_server_has_imported(mode: Mode) -> None:
    if not mode.is_possible or not is_of_this_version():
        pytest.skip(f"needs root, and a {PYTHON} of the version that this numpy is for")

    async def work(pool: SandboxPool) -> None:
        for program, last in SOUND_WITH_NUMPY.values():
            ended = await pool.run(program, "7\n", limits_of(mode, wall_s=20, cpu_s=10))
            assert (ended.exit_code, ended.output.strip()) == (0, last), ended
        assert "held" in (await pool.run(TRY + MISDEEDS["thread bomb"])).output

    with python_with("numpy") as python:
        in_pool(mode, work, python=python, preload=["numpy"])


@modes
def test_sixteen_sound_programs_are_right_beside_bombs_and_loops(mode: Mode) -> None:
    programs = [TRY + MISDEEDS["fork bomb"], "while True: pass", "print(sum(range(10)))"]

    async def at_once(pool: SandboxPool) -> None:
        limits = limits_of(mode, wall_s=3, cpu_s=1)
        ended = await asyncio.gather(*(pool.run(programs[n % 3], limits=limits) for n in range(48)))
        assert [each.output for each in ended[2::3]] == ["45\n"] * 16
        assert all(each.exit_code < 0 for each in ended[1::3])

    in_pool(mode, at_once)


@pytest.mark.parametrize("mode", MODES[2:4], ids=lambda mode: mode.name)
def test_the_server_is_started_again_when_it_dies_and_its_programs_die_with_it(mode: Mode) -> None:
    async def kill(pool: SandboxPool) -> None:
        await pool.run("pass")
        server = pool.server_pid
        running = asyncio.create_task(pool.run("import time\ntime.sleep(1)\nprint(7)"))
        await asyncio.sleep(0.2)
        lost = processes_of_programs(pool)
        os.kill(server, signal.SIGKILL)
        assert (await running).output == "7\n" and pool.server_pid != server
        assert lost and not lost & processes_of_programs(pool)

    in_pool(mode, kill)


FAMILY = """
import os, subprocess, time
subprocess.Popen(["sleep", "100"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(100)
    os._exit(0)
while True: time.sleep(1)
"""
"""A program that has a child of another program and a daemon, whose parent has ended and is not waited for."""


@pytest.mark.parametrize(
    ("has_namespaces", "limit", "program", "processes"),
    [(False, 1, "while True: pass", 4), (True, 1, "while True: pass", 5), (True, 8, FAMILY, 17)],
    ids=["fork server", "namespaces", "programs with processes"],
)
def test_no_process_is_left_when_the_worker_is_killed(
    has_namespaces: bool, limit: int, program: str, processes: int
) -> None:
    code = f"""if True:
        import asyncio, sys
        sys.path.insert(0, {PROJECT!r})
        from rollout_server.sandbox.pool import RunLimits, SandboxPool
        async def main():
            pool = SandboxPool(has_namespaces={has_namespaces}, python={PYTHON!r})
            await pool.run("pass")
            limits = RunLimits(wall_s=60, processes={limit})
            runs = [asyncio.create_task(pool.run({program!r}, limits=limits)) for _ in range(4)]
            print(pool.server_pid, flush=True)
            await asyncio.gather(*runs)
        asyncio.run(main())
    """
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    server = psutil.Process(int(worker.stdout.readline()))
    end_s = time.monotonic() + 30
    while len(programs := server.children(recursive=True)) < processes:
        assert time.monotonic() < end_s, programs
        time.sleep(0.05)
    assert "sleep" in {each.name() for each in programs} or limit == 1
    worker.kill()
    worker.wait()
    _, alive = psutil.wait_procs([server, *programs], timeout=10)
    assert [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []


def test_a_program_can_not_pretend_that_it_was_not_contained() -> None:
    async def pretend(pool: SandboxPool) -> None:
        text = "import os\nos.write(2, b'sandbox: error')\nfor f in range(3, 600):\n    try: os.write(f, b'1 error')\n"
        ended = await pool.run(text + "    except OSError: pass\nos._exit(251)")
        assert ended.exit_code == 251 and ended.errors == "sandbox: error"
        ended = await pool.run("import os\nos._exit = lambda code: None\nraise SystemExit(7)")
        assert ended.exit_code == 7

    in_pool(MODES[2], pretend)


def test_a_program_that_can_not_be_contained_is_not_run_and_the_error_says_why() -> None:
    async def fail(pool: SandboxPool) -> None:
        with pytest.raises(AsyncRLError, match=r"could not be contained: OverflowError.*"):
            await pool.run("print('I run')", limits=RunLimits(memory_bytes=1 << 70))
        assert (await pool.run("print('I run')")).output == "I run\n"

    in_pool(MODES[2], fail)
    in_pool(MODES[3], fail)


def test_a_server_that_can_not_have_namespaces_does_not_start() -> None:
    async def fail(pool: SandboxPool) -> None:
        with pytest.raises(AsyncRLError, match=r"fork server can't start: .*unshare"):
            await pool.run("print('I run')")

    for is_ordinary in (True, False):
        in_pool(Mode("", has_namespaces=True, is_ordinary=is_ordinary, forbids_namespaces=True), fail)


def test_a_killed_server_in_namespaces_takes_its_programs_with_it() -> None:
    async def kill(pool: SandboxPool) -> None:
        await pool.run("pass")
        running = asyncio.create_task(pool.run("import time\ntime.sleep(1)\nprint(7)"))
        outer = psutil.Process(pool.server_pid)
        while len(lost := outer.children(recursive=True)) < 2:
            await asyncio.sleep(0.01)
        lost[0].kill()  # the server itself; the process that was started waits for it
        assert (await running).output == "7\n" and pool.server_pid != outer.pid
        assert psutil.wait_procs(lost, timeout=10)[1] == []

    in_pool(MODES[3], kill)


def test_a_server_that_can_not_start_says_why() -> None:
    async def run() -> None:
        pool = SandboxPool(python="/usr/bin/python3", preload=["no_such_module_here"])
        try:
            await pool.run("pass")
        finally:
            await pool.aclose()

    with pytest.raises(AsyncRLError, match="can't start: ModuleNotFoundError: No module named 'no_such_module_here'"):
        asyncio.run(run())


def test_programs_that_wait_for_room_to_be_sent_are_all_sent() -> None:
    pool = SandboxPool(python=PYTHON)

    async def send_all() -> list[bytes]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.setblocking(False)
        pool._control = ours
        message = b"x" * 4096
        sending = [asyncio.create_task(pool._send(ours, message, [])) for _ in range(400)]  # far more than have room
        received: list[bytes] = []
        with theirs:
            async with asyncio.timeout(20):
                while len(received) < len(sending):
                    received.append(await asyncio.get_running_loop().sock_recv(theirs, 8192))
                await asyncio.gather(*sending)
            waiting = [asyncio.create_task(pool._send(ours, message, [])) for _ in range(400)]
            await asyncio.sleep(0.1)
            pool._hang_up()
            ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert any(isinstance(each, ConnectionError) for each in ended)
        assert all(each is None or isinstance(each, ConnectionError) for each in ended)
        return received

    assert len(asyncio.run(send_all())) == 400
