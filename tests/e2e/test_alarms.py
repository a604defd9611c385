"""An alarm ends a real run that loses what it has learned, with the model of the checkpoint before the fall."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from async_rl.config.loading import load_config
from async_rl.pipeline import run
from async_rl.storage.checkpoints import list_checkpoints
from async_rl.telemetry.status import format_status
from async_rl.telemetry.summary_table import format_summary
from rollout_server.question import Question
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e

ANSWERS = 16
"""The answers of a step."""
LEVELS = (0.5, 0.7, 0.9)
"""The mean rewards of the first steps; that of all later ones is 0."""
_calls = itertools.count()


def falling(question: Question, response: str) -> float:
    """A reward that rises over three steps and then falls, with a little that depends on the answer."""
    step = next(_calls) // ANSWERS
    return (LEVELS[step] if step < len(LEVELS) else 0.0) + 0.01 * (len(response) % 2)


@pytest.mark.nightly
def test_an_alarm_ends_a_run_with_the_model_before_the_fall(
    smoke_yaml: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    summary = run(load_config(smoke_yaml, [
        f"run.dir={tmp_path}", "run.name=falls", "run.steps=12", "rollout.engine=hf", "eval.size=0", "staleness.max=0",
        "task.reward=tests.e2e.test_alarms:falling", "checkpoint.every_steps=1", "checkpoint.keep_last=1",
        "alarms.action=stop", "alarms.window_steps=1", "alarms.cut_limit=.inf", "alarms.repeated_limit=.inf",
        "alarms.entropy_limit=0", "alarms.gradient_limit=0", "alarms.jump_limit=.inf",
    ]))  # fmt: skip
    run_dir = tmp_path / "falls"
    # the best batch, of step 3, was sampled by version 2
    assert summary["model_version"] == 2 and 2 in list_checkpoints(run_dir) and 4 <= summary["steps"] < 12
    assert "an alarm ended the run at step 4 (alarms.action stop), with the model of version 2" in summary["ended"]
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    assert (run_dir / "model" / "config.json").is_file()
    states = {int(line["step"]): line["alarm/reward"] for line in logged(run_dir) if "alarm/reward" in line}
    assert [states[step] for step in (1, 2, 3, 4)] == [0.0, 0.0, 0.0, 1.0]
    assert "reward since step 4 (docs/not-learning.md)" in summary["alarms"]
    assert summary["alarms"] in format_summary(summary) and summary["alarms"] in format_status(run_dir)
    said = capfd.readouterr().out
    assert "ALARM at step 4: the mean reward has fallen from 0.9" in said
    # before the first step the console says what is started, who tells how far that is, and when it is done
    start = said.partition("step  1/12")[0]
    assert f"starting buffer, 1 rollout server(s) (hf), 1 learner rank(s); `async-rl status {run_dir}` tells" in start
    assert "all processes are up after " in start
