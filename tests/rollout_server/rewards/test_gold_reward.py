"""The gold reward of an evaluation is found like other rewards, and scores held-out answers alone."""

from __future__ import annotations

import itertools

from rollout_server.rewards.rules import GSM8K
from rollout_server.rewards.scoring import open_gold_reward
from rollout_server.tasks.base import open_task
from tests.kit.configs import changed, make_config, worker_config
from tests.kit.engines.fakes import TOKENIZER, EchoEngine
from tests.kit.worker import evaluated, plain_reward


def test_a_gold_reward_is_a_name_of_task_reward_or_the_tasks_own() -> None:
    config = make_config(eval={"gold_reward": "gsm8k", "every_steps": 5}, task={"name": "reasoning_gym/chain_sum"})
    task = open_task(config, TOKENIZER)
    (named,) = open_gold_reward(config, task)
    (own,) = open_gold_reward(changed(config, eval={"gold_reward": "task"}), task)
    assert named.reward is GSM8K and own.reward == task.own_reward()  # type: ignore[attr-defined]
    assert named.name == own.name == "eval.gold_reward"  # whatever the trained ones are called
    assert open_gold_reward(changed(config, eval={"gold_reward": ""}), task) == ()


def told_by(score_gold: object) -> tuple[dict[str, float], tuple[str, ...]]:
    """The metrics and the notes of an evaluation of 12 answers, all of which are trained by the reward 1."""
    config = worker_config()
    gold = plain_reward(config, score_gold, name="eval.gold_reward")  # type: ignore[arg-type]
    return evaluated(config, EchoEngine(), [plain_reward(config, lambda *_: 1.0)], [gold])


def test_gold_rewards_that_fail_or_have_no_verdict_are_counted_and_told() -> None:
    calls = itertools.count()

    def fails(question: object, response: str) -> float:
        raise ValueError("no such service")

    found, notes = told_by(fails)
    assert found["eval/gold_failed"] == found["eval/accuracy"] * 12 == 12 and "eval/gold" not in found
    assert found["scoring/eval.gold_reward/failed"] == 6  # prompts
    (note,) = notes
    assert "eval.gold_reward failed" in note and "no such service" in note
    found, notes = told_by(lambda *_: None if next(calls) % 3 else 1.0)
    assert (found["eval/gold_labels"], found["eval/gold_no_verdict"], found["eval/gold"]) == (4, 8, 1)
    assert found["scoring/eval.gold_reward/no_verdict"] == 8 and not notes
