"""The gold reward of an evaluation is found like other rewards, and scores held-out answers alone."""

from __future__ import annotations

import asyncio

import pytest

from async_rl.errors import ConfigError
from rollout_server.rewards.base import NamedReward, open_gold_reward
from rollout_server.scored_player import ScoredPlayer
from rollout_server.tasks.base import open_task
from tests.kit.configs import changed, make_config, worker_config
from tests.kit.engines.fakes import TOKENIZER, EchoEngine
from tests.kit.worker import plain_reward


def test_a_gold_reward_is_a_name_of_task_reward_or_the_tasks_own() -> None:
    config = make_config(eval={"gold_reward": "gsm8k", "every_steps": 5}, task={"name": "reasoning_gym/chain_sum"})
    task = open_task(config, TOKENIZER)
    (named,) = open_gold_reward(config, task)
    (own,) = open_gold_reward(changed(config, eval={"gold_reward": "task"}), task)
    assert named.name == "gsm8k" and own.reward.function == task.verify
    assert open_gold_reward(changed(config, eval={"gold_reward": ""}), task) == ()


def test_an_environment_that_gives_the_rewards_has_no_gold_reward() -> None:
    config = make_config(eval={"gold_reward": "task", "every_steps": 5}, task={"name": "", "env": "my_envs:Env"})
    with pytest.raises(ConfigError, match=r"eval\.gold_reward must be empty with task\.env or task\.agent"):
        open_gold_reward(config, None)  # type: ignore[arg-type]


def test_held_out_answers_alone_get_the_gold_reward() -> None:
    config = worker_config()
    gold: list[str] = []

    def score_gold(question: object, response: str) -> float:
        gold.append(response)
        return 0.25

    def named(score: object) -> NamedReward:
        return plain_reward(config, score)

    async def play() -> dict[str, float]:
        engine, task = EchoEngine(), open_task(config, TOKENIZER)
        player = ScoredPlayer(config, 0, engine, task, [named(lambda *_: 1.0)], TOKENIZER, [named(score_gold)])
        try:
            report = await player.evaluate(0, beside_training=False)
            return {metric.key: metric.value for metric in report.metrics}
        finally:
            await player.aclose()

    found = asyncio.run(play())
    assert len(gold) == found["eval/gold_labels"] == 12
    assert (found["eval/gold"], found["eval/proxy"], found["eval/reward"]) == (0.25, 1.0, 1.0)
