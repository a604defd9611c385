"""Two servers and two learner ranks learn, and reach the same accuracy as one of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_rl.base.config.loading import load_config
from async_rl.cli import main
from async_rl.pipeline import run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
STEPS = 40
NOISE = 0.1
"""Tolerance for an accuracy: its standard error is 0.015 (1024 answers), and the timing of runs varies."""


@pytest.fixture(scope="module")
def warm_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("warm") / "model"
    assert main(["sft", str(QUICKSTART), f"model.path={folder}"]) == 0
    return folder


def trained(model: Path, tmp_path: Path, engine: str, servers: int, ranks: int) -> dict[str, Any]:
    """Train a short quickstart; returns its summary."""
    summary = run(load_config(QUICKSTART, [
        f"model.path={model}", f"run.dir={tmp_path}", f"run.name={servers}x{ranks}", f"run.steps={STEPS}",
        f"placement.rollout.servers={servers}", f"placement.learner.ranks={ranks}", f"rollout.engine={engine}",
        "logging.wandb=disabled",
    ]))
    assert summary["steps"] == STEPS
    assert summary["staleness_max"] <= 2
    assert summary["buffer"]["buffer/unaccounted"] == 0
    shown = ("accuracy_start", "accuracy_end", "staleness_max", "staleness_mean", "seconds")
    print({key: summary[key] for key in shown})
    return summary


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["hf"])
def test_two_servers_and_two_ranks_reach_the_accuracy_of_one_of_each(
    warm_model: Path, tmp_path: Path, engine: str
) -> None:
    one, two = (trained(warm_model, tmp_path, engine, n, n) for n in (1, 2))
    assert two["accuracy_end"] == pytest.approx(one["accuracy_end"], abs=NOISE)
    for summary in (one, two):
        assert summary["accuracy_end"] > summary["accuracy_start"] + 0.02  # there is something to compare
