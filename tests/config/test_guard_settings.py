"""A guard has the gold rewards, the checkpoints and the settings that its action needs, or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.errors import ConfigError

FILE = "model: {path: models/x}\ntask: {name: reasoning_gym/spell_backward}\n"


def load(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "config.yaml").write_text(FILE)
    return load_config(tmp_path / "config.yaml", overrides)


ROLLS_BACK = ("guard.action=rollback", "guard.every_steps=10", "checkpoint.every_steps=5", "guard.tighten=lr")
GOLD = ("eval.gold_reward=task", "eval.every_steps=5")


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (["checkpoint.every_steps=4"], r"checkpoint.every_steps must be a divisor of guard.every_steps = 10"),
        (["checkpoint.every_steps=0"], r"checkpoint.every_steps must be a divisor of"),
        (["eval.every_steps=7"], r"and eval.every_steps = 7 with guard.action rollback, got 5"),
        (["guard.tighten=kl"], r"guard.tighten must be lr with algorithm.kl.kind none, got 'kl'"),
        (["guard.tighten=kl", "guard.action=pause"], "guard.tighten must be lr"),
        (["eval.gold_reward=task"], r"empty without eval.size and eval.every_steps, got 'task'"),
        ([*GOLD, "reward_model.path=x"], r"eval.gold_reward must be empty with reward_model.path"),
        (["rollout.forbid_special_tokens=true", "rollout.engine=vllm"], r"false with rollout.engine vllm, got True"),
    ],
)
def test_a_guard_needs_checkpoints_of_what_it_measures(tmp_path: Path, overrides: list[str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        load(tmp_path, *ROLLS_BACK, *overrides)


def test_a_gold_reward_is_refused_where_files_have_no_held_out_prompts(tmp_path: Path) -> None:
    stops = ("guard.action=stop_at_best", "checkpoint.every_steps=5")
    for action in ((), stops):
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, *GOLD, *action, "task={path: x.jsonl}")
        assert str(caught.value) == (
            "task.eval_path must be the held-out file with eval.gold_reward and task.path, got ''. It scores answers "
            "to held-out prompts, and no others. Or leave eval.gold_reward empty."
        )
    for task in ("task={path: x.jsonl, eval_path: y.jsonl}", 'task={env: "my_envs:Env"}'):
        assert load(tmp_path, *GOLD, *stops, task).eval.gold_reward == "task"
    assert load(tmp_path, *stops, "eval.every_steps=5", "task={path: x.jsonl}").guard.action == "stop_at_best"


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ([], []),
        (["checkpoint.keep_best=1", "checkpoint.every_steps=10"], [10, 20]),
        (["checkpoint.keep_best=1", "checkpoint.every_steps=0"], []),
        (["guard.action=pause", "guard.tighten=lr"], [5, 10, 15, 20]),
        (["guard.action=stop_at_best", "checkpoint.every_steps=5"], [5, 10, 15, 20]),
        (["guard.action=warn"], []),
        (["eval.gold_reward=", "guard.action=stop_at_best", "checkpoint.every_steps=5"], []),
        (["eval.gold_reward=", "guard.action=stop_at_best", "checkpoint.every_steps=5", "reward_model.path=x"],
         [5, 10, 15, 20]),
    ],
)  # fmt: skip
def test_an_evaluation_is_needed_where_it_decides_on_a_checkpoint(
    tmp_path: Path, overrides: list[str], needed: list[int]
) -> None:
    config = load(tmp_path, *GOLD, *overrides)
    assert [version for version in (5, 10, 15, 20) if config.needs_evaluation_of(version)] == needed


def test_a_gold_reward_stands_beside_a_reward_model_and_the_tasks_rewards(tmp_path: Path) -> None:
    assert load(tmp_path, *GOLD, "reward_model.path=x", "reward_model.task_weight=0.5").eval.gold_reward == "task"
    with pytest.raises(ConfigError, match=r"reward_model\.task_weight must be 0 without reward_model\.path, got 0\.5"):
        load(tmp_path, "reward_model.task_weight=0.5")


def test_a_guard_warns_by_itself_where_the_reward_is_a_stand_in(tmp_path: Path) -> None:
    assert load(tmp_path).guard_action == ""
    for settings in (GOLD, ["reward_model.path=x"], ["judge.urls=[http://host/v1]"]):
        assert load(tmp_path, *settings).guard_action == "warn"
    assert load(tmp_path, *ROLLS_BACK).guard_action == "rollback"
    once, twice = (load(tmp_path, *ROLLS_BACK, f"guard.rollbacks={count}").guard for count in (1, 2))
    assert (once.lr_factor, twice.lr_factor, twice.kl_factor) == (0.5, 0.25, 1.0)
    assert load(tmp_path, "guard.rollbacks=2", "guard.tighten_by=3.0").guard.kl_factor == 9.0
