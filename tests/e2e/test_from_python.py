"""Runs that a Python program starts, watches, saves and ends."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import async_rl
from async_rl.base.run_dir.checkpoints import list_checkpoints
from tests.kit.documents import DOCUMENTS, ROOT, blocks
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e


@pytest.mark.nightly
def test_a_notebooks_cell_watches_a_run_saves_it_and_ends_it(smoke_yaml: Path) -> None:
    seen: list[async_rl.TrainedStep] = []

    def watch(step: async_rl.TrainedStep) -> None:
        seen.append(step)
        if step.version == 1:
            step.run.save()
        if step.version >= 3 and list_checkpoints(step.run.run_dir):
            step.run.end("three steps are enough")

    async def cell() -> dict[str, object]:
        config = async_rl.load_config(smoke_yaml, ["run.name=cell", "rollout.engine=hf", "run.steps=5000"])
        return async_rl.train(config, callbacks=[watch])

    summary = asyncio.run(cell())
    steps, run_dir = summary["steps"], seen[0].run.run_dir
    assert isinstance(steps, int) and 3 <= steps < 5000
    assert summary["ended"] == "three steps are enough"
    assert summary["accuracy_end"] is not None  # the version that is saved was evaluated
    assert [step.version for step in seen] == list(range(1, steps + 1))
    records = [record for record in logged(run_dir) if "reward/mean" in record]
    assert [record["reward/mean"] for record in records] == [step.metrics["reward/mean"] for step in seen]
    assert "eval/accuracy" in seen[0].metrics  # that of version 0
    assert steps in list_checkpoints(run_dir) and min(list_checkpoints(run_dir)) < steps
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert async_rl.evaluate(run_dir / "model")["eval/accuracy"] == summary["accuracy_end"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_programs_of_the_page_run_as_they_stand(smoke_yaml: Path, tmp_path: Path) -> None:
    smoke = smoke_yaml.read_text().replace(str(smoke_yaml.parent / "runs"), "runs")
    (tmp_path / "quickstart.yaml").write_text(smoke)
    programs = blocks(DOCUMENTS["docs/how-to/python.md"], "python")
    assert len(programs) == 4
    for program in programs:
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=280,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
