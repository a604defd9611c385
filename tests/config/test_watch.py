from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.base.config.check import SettingsError
from async_rl.base.config.loading import load_config
from async_rl.base.config.watch import RULES
from async_rl.run.watch.watcher import limits_of
from tests.kit.configs import make_config


def refused(**sections: object) -> str:
    """The key of the setting for which a configuration is refused."""
    with pytest.raises(SettingsError) as caught:
        make_config(**sections)
    return caught.value.problems[0].key


def test_a_run_that_may_go_back_must_write_checkpoints() -> None:
    for action in ("pause", "stop", "rollback"):
        make_config(watch={"action": action}, checkpoint={"every_steps": 5})
        assert refused(watch={"action": action}, checkpoint={"every_steps": 0}) == "checkpoint.every_steps"
    make_config(watch={"action": "warn"}, checkpoint={"every_steps": 0})


def test_limits_are_those_of_the_table_or_of_the_configuration_and_off_drops_a_rule(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "model: {path: m, dtype: bfloat16}\ntask: {name: reasoning_gym/spell_backward}\nstaleness: {max: 4}\n"
        "watch: {rules: {ess: 0.2, cut: off}}\n"
    )
    config = load_config(file, ["watch.rules.reward=5"])
    assert limits_of(config) == {
        name: rule.limit for name, rule in RULES.items() if name != "cut"
    } | {"ess": 0.2, "reward": 5.0}
    precise = limits_of(load_config(file, ["model.dtype=float32", "algorithm.correction.kind=none"]))
    assert precise["mismatch"] == 0.01 and "truncated" not in precise
    assert refused(watch={"rules": {"eß": 0.2}}) == "watch.rules.eß"
    assert refused(watch={"rules": {"ess": float("inf")}}).startswith("watch.rules")


def test_a_gold_reward_needs_held_out_answers_and_no_second_one() -> None:
    gold = {"eval": {"gold_reward": "task", "every_steps": 5, "num_prompts": 8}}
    make_config(**gold)
    assert refused(eval={"gold_reward": "task", "every_steps": 0, "num_prompts": 8}) == "eval.gold_reward"
    assert refused(**gold, reward_model={"path": "x"}) == "eval.gold_reward"
    make_config(**gold, reward_model={"path": "x", "task_weight": 0.5})
    assert refused(**gold, task={"name": "", "path": "x.jsonl"}) == "task.eval_path"


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, []),
        ({"checkpoint": {"keep_best": 1, "every_steps": 10}}, [10, 20]),
        ({"watch": {"action": "pause"}, "checkpoint": {"every_steps": 5}}, [5, 10, 15, 20]),
        ({"watch": {"action": "pause"}, "eval": {"every_steps": 5}, "checkpoint": {"every_steps": 5}}, []),
    ],
)
def test_an_evaluation_is_needed_where_it_decides_on_a_checkpoint(
    settings: dict[str, dict[str, object]], needed: list[int]
) -> None:
    config = make_config(**{"eval": {"gold_reward": "task", "every_steps": 5}, **settings})
    assert [version for version in (5, 10, 15, 20) if config.needs_evaluation_of(version)] == needed
