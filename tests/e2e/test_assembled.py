"""An assembled run ends with the error of its worker, and does not wait for batches that never come."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.base.config.loading import load_config
from async_rl.base.errors import RewardError
from rollout_server.question import Question
from tests.kit.assembled import run_assembled


def fails(question: Question, response: str) -> float:
    raise KeyError("no unit")


@pytest.mark.e2e
@pytest.mark.timeout(120)
def test_an_error_of_the_worker_ends_the_run(smoke_yaml: Path, tmp_path: Path) -> None:
    reward = [f"task.reward={__name__}:fails", "task.max_failures=3"]
    engine = ["rollout.engine=hf", "weight_sync.transport=disk"]
    config = load_config(smoke_yaml, [f"run.dir={tmp_path}", "eval.num_prompts=0", *engine, *reward])
    with pytest.raises(RewardError, match="no unit"):
        run_assembled(config)
