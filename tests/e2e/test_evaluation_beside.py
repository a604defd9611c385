"""Held-out evaluation beside training: pinned to one version, or with the versions its answers were sampled from."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from tests.kit.assembled import run_assembled

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("pin", [True, False])
def test_an_evaluation_is_pinned_to_its_version_or_says_which_ones_answered(
    smoke_yaml: Path, tmp_path: Path, pin: bool
) -> None:
    config = load_config(smoke_yaml, [
        f"run.dir={tmp_path}", "run.steps=8", "rollout.engine=hf", "staleness.max=4", "checkpoint.every_steps=0",
        "weight_sync.transport=disk",  # engine and learner share a process, which gloo does not allow
        "eval.num_prompts=150", "eval.every_steps=3", f"eval.pin_version={pin}",
    ])
    run = run_assembled(config)
    evaluated = sorted(run.evals)
    assert evaluated == [3, 6] or (evaluated == [3] and not pin), "unpinned, the first may last until 6 is due"
    versions = [(v, e["eval/oldest_version"], e["eval/newest_version"]) for v, e in run.evals.items()]
    assert max(step["staleness/max"] for step in run.steps) <= 4
    if pin:
        assert versions == [(3, 3, 3), (6, 6, 6)]
    else:
        assert all(version <= oldest <= newest for version, oldest, newest in versions)
        assert any(newest > version for version, _, newest in versions)  # nothing waited for it
    assert any("time/held_by_eval_s" in step for step in run.steps) == pin
