"""The memory that a process may use is its container's, if that has less than the host."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.base import host_memory
from async_rl.base.host_memory import free_host_bytes, host_bytes


def test_a_containers_limit_bounds_the_memory_that_processes_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host_memory, "CONTAINER_LIMIT", limit)
    whole = host_bytes()
    assert 2**20 < free_host_bytes() <= whole
    limit.write_text("max\n")
    assert host_bytes() == whole
    limit.write_text(f"{2**20}\n")
    assert host_bytes() == free_host_bytes() == 2**20
