"""The quickstart with a learning rate that is far too high, from the first step and after a sound beginning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.storage.checkpoints import list_checkpoints
from async_rl.telemetry.status import format_status
from tests.kit.documents import ROOT
from tests.kit.runs import logged

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1200)]

AFTER = 50
"""The optimizer steps of the sound beginning."""


def command(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "async_rl", *words], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model that `async-rl sft` makes."""
    folder = tmp_path_factory.mktemp("quickstart")
    command("sft", "configs/quickstart.yaml", f"model.path={folder / 'model'}")
    return folder


def train(folder: Path, name: str, *settings: str) -> str:
    places = (f"model.path={folder / 'model'}", f"run.dir={folder}", f"run.name={name}")
    return command(
        "train", "configs/quickstart.yaml", *places, "rollout.engine=hf", "logging.wandb=disabled", *settings
    )


def test_a_learning_rate_of_a_tenth_ends_with_a_sentence_that_it_has_not_learned(folder: Path) -> None:
    said = train(folder, "note", "learner.lr=0.1", "run.steps=25")
    summary = json.loads((folder / "note" / "summary.json").read_text())
    assert summary["steps"] == 25 and summary["accuracy_end"] < 0.1 < summary["accuracy_start"]
    first = re.search(r"ALARM at step (\d+): the mean reward has fallen from [\d.]+ to [\d.e-]+\. ", said)
    assert first and int(first[1]) <= 10, said
    assert "reward since step" in summary["alarms"] and said.rstrip().endswith(summary["alarms"])
    assert summary["alarms"] in format_status(folder / "note")

    said = train(folder, "stop", "learner.lr=0.1", "run.steps=60", "alarms.action=stop")
    summary = json.loads((folder / "stop" / "summary.json").read_text())
    assert summary["steps"] < 20 and "an alarm ended the run at step" in summary["ended"]
    assert summary["ended"] in said
    # it fell with its first step, so that nothing it has made is worth keeping
    assert "no checkpoint yet (checkpoint.every_steps); the one before the fall is that of model.path" in said


def test_a_fall_after_a_sound_beginning_leaves_the_model_before_it(folder: Path) -> None:
    said = train(
        folder, "later", "run.steps=90", "checkpoint.every_steps=10", "alarms.action=stop",
        "learner.optimizer=benchmarks.collapsing_runs:FaultyAdamW",
        f"learner.optimizer_params={{after: {AFTER}, factor: 20}}",
    )
    run_dir = folder / "later"
    summary = json.loads((run_dir / "summary.json").read_text())
    kept, steps = summary["model_version"], summary["steps"]
    assert AFTER < steps <= AFTER + 10 and 0 < kept <= AFTER
    assert kept in list_checkpoints(run_dir) and (run_dir / "model" / "config.json").is_file()
    assert f"(alarms.action stop), with the model of version {kept}: " in said
    rewards = {int(line["step"]): line["reward/mean"] for line in logged(run_dir) if "reward/mean" in line}
    assert rewards[kept] > (rewards[1] + max(rewards.values())) / 2
    accuracy = dict(line.split() for line in command("eval", str(run_dir / "model")).splitlines())["eval/accuracy"]
    assert float(accuracy) > summary["accuracy_start"] + 0.05
