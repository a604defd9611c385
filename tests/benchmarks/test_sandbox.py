"""The benchmark of the sandbox measures each way to run a program."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.sandbox import left_behind, memory, memory_of_processes, misdeeds, rates
from rollout_server.sandbox import kernel
from rollout_server.sandbox.protection import find_protection

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(kernel.landlock_abi() < 1, reason="this kernel has no Landlock"),
]


def test_each_way_is_measured_against_a_subprocess() -> None:
    table = asyncio.run(rates(0.5, 1))
    ways = ("subprocess", "fork server", "namespaces")[: 3 if find_protection().has_namespaces else 2]
    assert [(row[0], row[1]) for row in table.rows] == [(way, at_once) for at_once in ("1", "4") for way in ways]
    ratios = {row[0]: float(row[3]) for row in table.rows}
    assert ratios["subprocess"] == 1 and ratios["fork server"] > 0


def test_misdeeds_of_all_kinds_run_beside_sound_programs() -> None:
    name, right, held, children, left, _ = asyncio.run(misdeeds(has_namespaces=False, wall_s=8.0))
    assert (name, right, held, children, left) == ("fork server", "16 of 16", "48 of 48", "0", "0")


def test_memory_and_processes_left_behind_are_measured() -> None:
    name, alone_mib, together_mib = asyncio.run(memory(has_namespaces=False))
    assert name == "fork server" and 1 < float(alone_mib) < float(together_mib)
    name, alone, together_mib = asyncio.run(memory_of_processes())
    assert (name, alone) == ("subprocess", "") and float(together_mib) > 1
    assert left_behind(has_namespaces=False)[1:] == ["9", "0"]
