"""Servers join, leave and die while a run makes steps. The journal and the metrics are audited afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.elastic_matrix import BY_HOST, EVENTS, SITUATIONS, DisturbedRun, Outcome, disturb
from benchmarks.two_hosts import TwoHosts, why_not

pytestmark = pytest.mark.e2e

SETTINGS = ["staleness.max=2", "task.size=100000"]


def problems(run: DisturbedRun, *events: str) -> list[str]:
    """Make the events happen, end the run, and return what is wrong with it."""
    outcomes: list[Outcome] = []
    found = disturb(run, events, random.Random(1), outcomes)
    return [f"{what}: {problem}" for what, problem in found.items() if problem]


@pytest.mark.timeout(600)
def test_a_server_drains_and_joins_again_and_one_that_dies_is_replaced(smoke_yaml: Path, tmp_path: Path) -> None:
    run = DisturbedRun(str(smoke_yaml), "hf", "group", SETTINGS, tmp_path, most=2)
    assert problems(run, "drain", "kill worker") == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("situation", ["starting", "filling", "push", "exact", "delta"])
def test_events_at_chosen_moments_cost_no_group(smoke_yaml: Path, tmp_path: Path, situation: str) -> None:
    """All situations: python -m benchmarks.elastic_matrix."""
    assert situation in SITUATIONS
    run = DisturbedRun(str(smoke_yaml), "hf", situation, SETTINGS, tmp_path)
    assert problems(run, *(each for each in EVENTS if each != "kill server")) == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_an_sglang_server_joins_drains_and_dies(smoke_yaml: Path, tmp_path: Path) -> None:
    run = DisturbedRun(str(smoke_yaml), "sglang", "group", SETTINGS, tmp_path, most=2)
    assert problems(run, "drain", "kill server", "kill buffer") == []


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_second_host_joins_leaves_and_comes_back_while_steps_are_made(smoke_yaml: Path, tmp_path: Path) -> None:
    """It leaves by SIGTERM to `ray start`, as with Kubernetes and SLURM: Ray announces it, and the server drains."""
    if reason := why_not():
        pytest.skip(reason)
    run = DisturbedRun(str(smoke_yaml), "hf", "group", SETTINGS, tmp_path, most=2, hosts=TwoHosts(tmp_path))
    assert problems(run, BY_HOST) == []
    assert run.lines("drains for at most") == run.lines("leaves: its host leaves") == 1
