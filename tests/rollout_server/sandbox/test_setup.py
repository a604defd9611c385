"""A pool can give its programs prepared names, a Python that is closed to others, and no containment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from async_rl.errors import ConfigError
from rollout_server.sandbox import kernel
from rollout_server.sandbox.pool import RunLimits, SandboxPool
from tests.kit.sandbox.hosts import IS_ROOT, MODES, PYTHON, exposed_host, pool_of, python_with

needs_sandbox = pytest.mark.skipif(kernel.landlock_abi() < 1, reason="this kernel has no Landlock")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=f"there is no {PYTHON}"),
]


CAN_READ_ALL = 2
"""CAP_DAC_READ_SEARCH, which Docker does not give root; it gives CAP_DAC_OVERRIDE."""
LACKS = """#!/usr/bin/python3 -I
import ctypes, os, sys
for right in {lacks}:
    assert ctypes.CDLL(None).prctl(24, right, 0, 0, 0) == 0
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def use(pool: SandboxPool, run: Callable[[SandboxPool], Awaitable[None]]) -> None:
    async def run_and_close() -> None:
        try:
            await run(pool)
        finally:
            await pool.aclose()

    asyncio.run(run_and_close())


@needs_sandbox
@pytest.mark.skipif(not IS_ROOT, reason="needs root")
@pytest.mark.parametrize("lacks", [[], [CAN_READ_ALL]], ids=["all rights", "those of Docker"])
def test_programs_of_root_read_a_python_that_is_closed_to_others_and_no_other_file(lacks: list[int]) -> None:
    (reading,) = (mode for mode in MODES if mode.reads_as_root)

    async def read(pool: SandboxPool) -> None:
        ended = await pool.run(f"print(open({str(module)!r}).read())\nprint(open('/proc/self/status').read())")
        assert ended.output == "sesame\n" and "PermissionError" in ended.errors
        ended = await pool.run(f"open({str(module)!r}, 'w')")
        assert "PermissionError" in ended.errors and module.read_text() == "sesame"
        with exposed_host() as values:
            for closed in (values["DIR"] + "/secret", str(beside)):
                assert "PermissionError" in (await pool.run(f"open({closed!r})")).errors

    with python_with() as python:
        prefix = Path(python).parents[1]
        module, beside = prefix / "lib" / "module.py", prefix / "runs" / "key"
        for folder in (module.parent, beside.parent):
            folder.mkdir()
        beside.write_text("the key of a run beside the libraries")
        beside.chmod(0o600)
        module.write_text("sesame")
        module.chmod(0o600)
        prefix.chmod(0o700)
        wrapper = prefix / "wrapper"
        wrapper.write_text(LACKS.format(python=python, lacks=lacks))
        wrapper.chmod(0o700)
        with pool_of(reading, python=str(wrapper), preload=["json"]) as pool:
            use(pool, read)
        with pytest.raises(ConfigError, match="needs a Python that every user can read"):
            SandboxPool(python=python)


def test_programs_that_are_not_contained_still_have_limits() -> None:
    async def run(pool: SandboxPool) -> None:
        assert (await pool.run(f"print(open({__file__!r}).readline())")).output.startswith('"""A pool can')
        assert (await pool.run("while True: pass", limits=RunLimits(wall_s=0.5))).is_late
        assert "MemoryError" in (await pool.run("x = bytearray(1 << 30)")).errors

    use(SandboxPool(is_contained=False), run)


@needs_sandbox
def test_programs_import_what_the_server_has_prepared_and_change_it_for_themselves() -> None:
    async def run(pool: SandboxPool) -> None:
        program = "from prepared import number, numbers\nnumbers.append(number)\nprint(numbers)"
        assert [(await pool.run(program)).output for _ in range(2)] == ["[1, 7]\n"] * 2

    use(SandboxPool(python=PYTHON, setup="numbers = [1]\nnumber = 7"), run)
