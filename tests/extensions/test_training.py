"""A run that trains with parts from outside the packages, named as module:name in its configuration."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from async_rl.pipeline import run

OUTSIDE = [
    "rollout.engine=tests.extensions.engine:COUNTING", "weight_sync.transport=tests.extensions.transport:NEW_FOLDERS",
    "task.name=tests.extensions.task:Additions",
    "task.reward=tests.extensions.reward:answer_length", "algorithm.loss=tests.extensions.loss:POLICY_GRADIENT",
    "algorithm.advantage=tests.extensions.advantage:WIN_RATE",
    "algorithm.correction.kind=tests.extensions.correction:ROOT",
]


@pytest.mark.e2e
def test_a_run_trains_with_parts_from_outside_the_packages(smoke_yaml: Path) -> None:
    config = load_config(smoke_yaml, ["run.name=outside", "staleness.max=1", "eval.num_prompts=0", *OUTSIDE])
    summary = run(config)
    assert summary["steps"] == 4
    assert summary["buffer"]["buffer/trained"] == 4 * config.learner.prompts_per_step
    versions = Counter((config.run_dir / "logs" / "counting-0.log").read_text().split())
    assert {"0", "1", "2"} <= versions.keys()
