"""The settings of rewards: which names they have, and which of them do not go together."""

from __future__ import annotations

from async_rl.base.config import TaskConfig
from async_rl.base.config.loading import load_config

BASE = ["model.path=x", "task.path=x.jsonl", "rollout.engine=hf"]
SEVERAL = "task.rewards=[{reward: gsm8k}, {name: short, reward: 'my:SHORT', weight: -0.5, params: {limit: 3}}, {}]"


def test_rewards_are_named_by_their_function_unless_they_have_a_name() -> None:
    config = load_config(None, [*BASE, SEVERAL])
    assert [(each.name, each.reward, each.weight) for each in config.task.named_rewards] == [
        ("gsm8k", "gsm8k", 1.0), ("short", "my:SHORT", -0.5), ("task", "", 1.0),
    ]  # fmt: skip
    alone = load_config(None, [*BASE, "task.reward=my_rewards:score"])
    assert [each.name for each in alone.task.named_rewards] == ["score"]


def test_an_environment_gives_the_rewards_to_which_named_ones_are_added() -> None:
    assert TaskConfig(env="my:Env").named_rewards == ()
    config = load_config(None, ["model.path=x", "task.env=my:Env", "task.rewards=[{reward: 'my:f'}]"])
    assert [each.name for each in config.task.named_rewards] == ["f"]
