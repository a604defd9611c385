"""A task and a reward from outside the packages need nothing but their names in the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from async_rl.base.config import TaskConfig
from async_rl.base.errors import ConfigError
from async_rl.cli import main
from rollout_server.rewards.base import open_rewards
from rollout_server.tasks.base import Task, open_task
from tests.kit.configs import make_config, worker_config
from tests.kit.engines.fakes import TOKENIZER, EchoEngine
from tests.kit.models import save_tiny_model
from tests.kit.worker import rolled_out

TASK = {"name": "tests.extensions.task:Additions", "max_prompt_tokens": 40}
REWARD = {"reward": "tests.extensions.reward:answer_length"}


@pytest.mark.parametrize("reward", [{}, REWARD])
def test_a_worker_rolls_out_an_outside_task_and_scores_it(reward: dict[str, str]) -> None:
    config = worker_config(task=TaskConfig(**TASK, **reward))
    task = open_task(config, TOKENIZER)
    (batch,), *_ = rolled_out(config, EchoEngine(), open_rewards(config, task))
    for group in batch.groups:
        answer = task.prompt(group.prompt_index).question.ground_truth
        assert [row.reward for row in group.rows] == [len(answer) if reward else 1] * 3


def test_the_eval_command_measures_an_outside_task_and_reward(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "model", seed=0)
    config = {
        "model": {"path": "elsewhere"}, "task": {**TASK, **REWARD}, "eval": {"num_prompts": 4},
        "rollout": {"engine": "hf", "max_response_tokens": 4},
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["eval", str(tmp_path / "model")]) == 0
    lines = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("eval/"))
    assert float(lines["eval/failed"]) == 0 and float(lines["eval/reward"]) > 0


class WithoutVerifier(Task):
    def train_question(self, position: int) -> None: ...

    def eval_questions(self) -> None: ...


class WithoutSize(WithoutVerifier):
    def verify(self, question: object, response: str) -> float:
        return 0.0


class TooLarge(WithoutSize):
    num_prompts = 2**26 + 1


@pytest.mark.parametrize(("name", "named"), [
    ("json:JSONDecoder", "JSONDecoder"), (f"{__name__}:WithoutVerifier", "WithoutVerifier.* verify"),
    (f"{__name__}:WithoutSize", "num_prompts"), (f"{__name__}:TooLarge", "67108865.*TooLarge"),
    ("no_such_module_here:Task", "no_such_module_here"),
])
def test_a_class_that_is_no_task_is_refused_with_what_it_lacks(name: str, named: str) -> None:
    config = make_config(task={"name": name})
    with pytest.raises(ConfigError, match=named):
        open_task(config, TOKENIZER)
