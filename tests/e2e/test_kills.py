"""SIGKILL in mid-run: what can be brought back is, the rest ends the run with one error."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.kill_matrix import kill_once

pytestmark = pytest.mark.e2e

MANY = ["placement.rollout.servers=2", "placement.learner.ranks=2", "staleness.max=2", "run.steps=100000"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("worker", ["rollout.engine=hf", "run.seconds=25"]),
        pytest.param("worker", ["run.seconds=120"], marks=pytest.mark.nightly),
        pytest.param("server", ["run.seconds=120"], marks=pytest.mark.nightly),
    ],
)
def test_a_server_that_is_killed_comes_back_and_every_group_is_accounted_for(
    smoke_yaml: Path, tmp_path: Path, kind: str, overrides: list[str]
) -> None:
    outcome = kill_once(str(smoke_yaml), kind, [*MANY, *overrides], random.Random(1), tmp_path)
    assert outcome.exit_code == 0, (tmp_path / f"{kind}.log").read_text()[-3000:]
    assert outcome.back_s > 0
    assert outcome.counts_add_up
    assert outcome.staleness_max <= 2
    assert outcome.orphans == 0


@pytest.mark.timeout(200)
def test_a_learner_rank_that_is_killed_ends_the_run_and_is_named(smoke_yaml: Path, tmp_path: Path) -> None:
    outcome = kill_once(str(smoke_yaml), "learner", [*MANY, "rollout.engine=hf"], random.Random(1), tmp_path)
    assert outcome.exit_code == 1
    assert outcome.named.startswith("learner/")
    assert outcome.ended_s < 60
    assert outcome.orphans == 0
    assert "Traceback" not in (tmp_path / "learner.log").read_text()
