"""The cores, threads and memory of a process, which is in a container perhaps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.base import host
from async_rl.base.host import SPINS, free_host_bytes, host_bytes, server_threads, threads_per_process, usable_cores
from rollout_server.engines.sglang import launch as sglang
from rollout_server.engines.vllm import engine as vllm
from tests.kit.configs import make_config


@pytest.mark.parametrize(("pinned", "threads"), [(False, 3), (True, 6)])
def test_threads_are_counted_on_the_cores_the_process_may_use(
    pinned: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One learner rank and one server; a pinned process has only its own share to count."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    config = make_config(placement={"pin_cpus": pinned})
    assert usable_cores() == 6
    assert threads_per_process(config) == threads


@pytest.mark.parametrize(("began_with", "now", "expected"), [
    (b"RAY_RAYLET_PID=7\0HOME=/", {"RAY_RAYLET_PID": "7", "OMP_NUM_THREADS": "1"}, "3"),
    (b"RAY_RAYLET_PID=7\0OMP_NUM_THREADS=1", {"RAY_RAYLET_PID": "7", "OMP_NUM_THREADS": "1"}, "1"),
    (b"HOME=/", {"OMP_NUM_THREADS": "2"}, "2"),
    (b"HOME=/", {}, "3"),
])
def test_a_server_gets_its_share_of_the_cores_though_ray_says_one_thread(
    began_with: bytes, now: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of threads is the user's only if the process has begun with it, or is not one of Ray's."""
    (tmp_path / "environ").write_bytes(began_with)
    monkeypatch.setattr(host, "BEGAN_WITH", tmp_path / "environ")
    monkeypatch.setattr(os, "environ", now)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    config = make_config()
    assert server_threads(config) == expected
    of_sglang = sglang.server_environment(config, {"dtype": "auto"})
    of_vllm = vllm.server_environment(config, sys.executable, on_gpu=False)
    assert (of_sglang["OMP_NUM_THREADS"], of_vllm["OMP_NUM_THREADS"]) == (expected, expected)


@pytest.mark.processes
def test_a_command_limits_the_spinning_before_torch_is_loaded() -> None:
    program = (
        "from async_rl.cli import main\n"
        "try:\n    main(['status', '/none'])\nfinally:\n    import torch"
    )
    environment = {key: value for key, value in os.environ.items() if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"}, text=True,
        capture_output=True, timeout=300,
    )
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in found.stderr, found.stderr[-2000:]


def test_a_containers_limit_bounds_the_memory_that_processes_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host, "CONTAINER_LIMIT", limit)
    whole = host_bytes()
    assert 2**20 < free_host_bytes() <= whole
    limit.write_text("max\n")
    assert host_bytes() == whole
    limit.write_text(f"{2**20}\n")
    assert host_bytes() == free_host_bytes() == 2**20
