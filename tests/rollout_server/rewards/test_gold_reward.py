"""The gold reward of an evaluation is found like other rewards, and scores held-out answers alone."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from async_rl.base.errors import ConfigError
from async_rl.base.telemetry.metrics import reduce_metrics
from rollout_server.rewards.base import NamedReward, open_gold_reward
from rollout_server.rewards.rules import GSM8K
from rollout_server.tasks.base import open_task
from rollout_server.worker.scored_player import ScoredPlayer
from tests.kit.configs import changed, make_config, worker_config
from tests.kit.engines.fakes import TOKENIZER, EchoEngine
from tests.kit.worker import plain_reward


def test_a_gold_reward_is_a_name_of_task_reward_or_the_tasks_own() -> None:
    config = make_config(eval={"gold_reward": "gsm8k", "every_steps": 5}, task={"name": "reasoning_gym/chain_sum"})
    task = open_task(config, TOKENIZER)
    (named,) = open_gold_reward(config, task)
    (own,) = open_gold_reward(changed(config, eval={"gold_reward": "task"}), task)
    assert named.reward is GSM8K and own.reward == task.own_reward()  # type: ignore[attr-defined]
    assert named.name == own.name == "eval.gold_reward"  # whatever the trained ones are called
    assert open_gold_reward(changed(config, eval={"gold_reward": ""}), task) == ()


def test_an_environment_that_gives_the_rewards_has_no_gold_reward() -> None:
    config = make_config(eval={"gold_reward": "task", "every_steps": 5}, task={"name": "", "env": "my_envs:Env"})
    with pytest.raises(ConfigError, match=r"^eval\.gold_reward .*task\.env"):
        open_gold_reward(config, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "key"),
    [("gsm8kk", r"eval\.gold_reward .*gsm8kk"), ("judge", r"eval\.gold_reward .*judge\.path"),
     ("code", r"timeouts\.reward_s .*eval\.gold_reward code")],  # too little time
)  # fmt: skip
def test_a_gold_reward_that_can_not_work_is_refused_by_its_own_key(name: str, key: str) -> None:
    config = make_config(
        timeouts={"reward_s": 20.0}, eval={"gold_reward": name, "every_steps": 5},
        task={"name": "reasoning_gym/chain_sum", "sandbox": {"kind": "none"}},
    )  # fmt: skip
    with pytest.raises(ConfigError, match=f"^{key}"):
        open_gold_reward(config, open_task(config, TOKENIZER))


def evaluated(score_gold: object) -> tuple[dict[str, float], tuple[str, ...]]:
    """The metrics and the notes of an evaluation of 12 answers, all of which are trained by the reward 1."""
    config = worker_config()

    def named(score: object, **fields: object) -> NamedReward:
        return plain_reward(config, score, **fields)

    async def play() -> tuple[dict[str, float], tuple[str, ...]]:
        engine, task = EchoEngine(), open_task(config, TOKENIZER)
        gold = named(score_gold, name="eval.gold_reward")
        player = ScoredPlayer(config, 0, engine, task, [named(lambda *_: 1.0)], TOKENIZER, [gold])
        try:
            report = await player.evaluate(0, beside_training=False)
            return reduce_metrics([*report.metrics, *player.drain_metrics()]), player.drain_notes()
        finally:
            await player.aclose()

    return asyncio.run(play())


def test_gold_rewards_that_fail_or_have_no_verdict_are_counted_and_told() -> None:
    calls = itertools.count()

    def fails(question: object, response: str) -> float:
        raise ValueError("no such service")

    found, notes = evaluated(fails)
    assert found["eval/gold_failed"] == found["eval/accuracy"] * 12 == 12 and "eval/gold" not in found
    assert found["scoring/eval.gold_reward/failed"] == 6  # prompts
    (note,) = notes
    assert "eval.gold_reward failed" in note and "no such service" in note
    found, notes = evaluated(lambda *_: None if next(calls) % 3 else 1.0)
    assert (found["eval/gold_labels"], found["eval/gold_no_verdict"], found["eval/gold"]) == (4, 8, 1)
    assert found["scoring/eval.gold_reward/no_verdict"] == 8 and not notes


def test_all_gold_rewards_of_an_evaluation_are_asked_for_at_once() -> None:
    """Each waits for those of all other prompts."""
    together = asyncio.Barrier(12)

    async def score(question: object, response: str) -> float:
        await together.wait()
        return 0.5

    assert evaluated(score)[0]["eval/gold_labels"] == 12


def test_held_out_answers_alone_get_the_gold_reward() -> None:
    gold: list[str] = []

    def score_gold(question: object, response: str) -> float:
        gold.append(response)
        return 0.25

    found, _ = evaluated(score_gold)
    assert len(gold) == found["eval/gold_labels"] == 12
    assert (found["eval/gold"], found["eval/proxy"], found["eval/reward"]) == (0.25, 1.0, 1.0)
