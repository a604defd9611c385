"""A run that trains with parts from outside the packages, named as module:name in its configuration."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from tests.kit.assembled import run_assembled

OUTSIDE = [
    "rollout.engine=tests.extensions.engine:COUNTING", "weight_sync.transport=tests.extensions.transport:NEW_FOLDERS",
    "task.name=tests.extensions.task:Additions", "task.reward=tests.extensions.reward:answer_length",
    "algorithm.loss=tests.extensions.loss:POLICY_GRADIENT", "algorithm.advantage=tests.extensions.advantage:WIN_RATE",
    "algorithm.correction.kind=tests.extensions.correction:ROOT",
]


@pytest.mark.e2e
def test_a_run_trains_with_parts_from_outside_the_packages(smoke_yaml: Path, tmp_path: Path) -> None:
    settings = [f"run.dir={tmp_path}", "run.name=outside", "staleness.max=1", "eval.num_prompts=0", *OUTSIDE]
    config = load_config(smoke_yaml, settings)
    (config.run_dir / "logs").mkdir(parents=True)
    run = run_assembled(config)
    assert len(run.steps) == 4 and "loss/bounded_fraction" in run.steps[0]
    assert run.counters["buffer/trained"] == 4 * config.learner.prompts_per_step
    (log,) = tmp_path.rglob("counting-0.log")
    assert {"0", "1", "2"} <= Counter(log.read_text().split()).keys()
