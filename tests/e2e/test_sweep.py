"""A whole sweep: its cells are real runs, and it ends with a table and a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.cli import main
from async_rl.telemetry.metrics import read_metrics

pytestmark = pytest.mark.e2e
FILE = "metrics.jsonl"


@pytest.mark.parametrize("engine", ["hf", pytest.param("sglang", marks=pytest.mark.nightly)])
def test_each_cell_of_a_sweep_starts_from_the_same_weights(
    smoke_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str
) -> None:
    options = ["--staleness", "0,2", "--seeds", "1", "--name", "s", f"run.dir={tmp_path}", f"rollout.engine={engine}"]
    assert main(["sweep", str(smoke_yaml), *options]) == 0
    out = capsys.readouterr().out
    assert "can't be judged from a single seed" in out
    folder = tmp_path / "s"
    for bound in (0, 2):
        cell = folder / "cells" / f"staleness-{bound}.seed-0"
        assert (cell / "logs" / "sglang-rollout-0.log").exists() == (engine == "sglang")
        first = next(step for step in read_metrics(cell / "metrics.jsonl") if step["step"] == 1)
        # Sampled by the version 0 that the learner starts from, whatever the cell before has trained.
        assert (first["mismatch/mean_abs"] or 0.0) < 1e-4
        assert first["staleness/episodes_0"] == 16
    assert (folder / "report.html").stat().st_size > 10_000


@pytest.mark.nightly
def test_a_setting_of_a_loss_from_outside_is_swept_and_its_metric_is_written(
    smoke_yaml: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--staleness", "1", "--seeds", "1", "--axis", "algorithm.params.bound=0.5,1.0,100.0", "--name", "s"]
    settings = ["rollout.engine=hf", "run.steps=3", "eval.size=0", f"run.dir={tmp_path}"]
    loss = "algorithm.loss=tests.extensions.loss:POLICY_GRADIENT"
    assert main(["sweep", str(smoke_yaml), *options, *settings, loss]) == 0
    learned = capsys.readouterr().out.partition("## What was learned")[2]
    bounded = {}
    for bound in ("0.5", "1.0", "100.0"):
        assert f"| {bound} |" in learned.replace("**", "")
        metrics = read_metrics(tmp_path / "s" / "cells" / f"staleness-1.algorithm.params.bound-{bound}.seed-0" / FILE)
        bounded[bound] = [step["loss/bounded_fraction"] for step in metrics if step["step"] > 0]
    assert max(bounded["0.5"]) > max(bounded["100.0"]) == 0
    assert all(len(of_steps) == 3 for of_steps in bounded.values())
