"""Tests of the number of cores and threads of a process."""

from __future__ import annotations

import os

import pytest

from async_rl.config import Config, ModelConfig, PlacementConfig, TaskConfig
from async_rl.cores import threads_per_process, usable_cores


@pytest.mark.parametrize(("pinned", "threads"), [(False, 3), (True, 6)])
def test_threads_are_counted_on_the_cores_the_process_may_use(
    pinned: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One learner rank and one server; a pinned process has only its own share to count."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    config = Config(
        model=ModelConfig(path="m"), task=TaskConfig(name="reasoning_gym/chain_sum"),
        placement=PlacementConfig(pin_cpus=pinned),
    )
    assert usable_cores() == 6
    assert threads_per_process(config) == threads
