"""Settings that nothing reads are told, and taken: along an axis of a sweep they have an effect in some cells only."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.config.presets import PRESETS
from async_rl.base.config.unused import unused_settings

ROOT = Path(__file__).parents[2]
FILE = "model: {path: models/x}\ntask: {name: reasoning_gym/spell_backward}\n"


def load(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "config.yaml").write_text(FILE)
    return load_config(tmp_path / "config.yaml", overrides)


@pytest.mark.parametrize(
    ("setting", "without", "with_effect", "beside"),
    [
        ("algorithm.clip.high=0.5", ["algorithm.loss=dppo_tv"], ["algorithm.loss=cispo"], "algorithm.loss dppo_tv"),
        ("algorithm.clip.low=0.1", ["algorithm.preset=dppo_tv"], ["algorithm.loss=ppo_clip"], "algorithm.loss dppo_tv"),
        (
            "algorithm.gae_lambda=0.5", ["algorithm.advantage=reinforce_pp"], ["algorithm.advantage=vtrace"],
            "algorithm.advantage reinforce_pp",
        ),
        ("critic.path=models/critic", [], ["algorithm.advantage=gae"], "algorithm.advantage grpo"),
        ("critic.warmup_steps=10", [], ["algorithm.advantage=gae"], "algorithm.advantage grpo"),
        ("learner.lr_decay=cosine", [], ["learner.lr_decay_fraction=0.5"], "learner.lr_decay_fraction 0"),
        (
            "learner.lr_decay_to=0.1", ["learner.lr_decay_fraction=0"], ["learner.lr_decay_fraction=1"],
            "learner.lr_decay_fraction 0",
        ),
        (
            "algorithm.correction.batch_normalised=True", ["algorithm.advantage=vtrace", "staleness.max=2"],
            ["staleness.max=2"], "algorithm.advantage vtrace",
        ),
    ],
)  # fmt: skip
def test_a_setting_is_told_where_nothing_reads_it_and_only_there(
    tmp_path: Path, setting: str, without: list[str], with_effect: list[str], beside: str
) -> None:
    assert unused_settings(load(tmp_path, *without)) == unused_settings(load(tmp_path, *with_effect, setting)) == []
    key, value = setting.split("=")
    assert unused_settings(load(tmp_path, *without, setting)) == [f"{key} {value} has no effect with {beside}."]


def test_a_penalty_that_does_not_reach_the_earlier_rows_of_an_episode_is_told(tmp_path: Path) -> None:
    penalised, plays = "algorithm.kl.kind=k1_reward", ["task.name=", "task.env=my_module:Play"]
    (told,) = unused_settings(load(tmp_path, penalised, *plays))
    assert told.startswith("algorithm.kl.kind k1_reward has no effect from row to row: ") and "max_rows 4)" in told
    for others in ([penalised], [penalised, *plays, "rollout.max_rows=1"], ["algorithm.kl.kind=k2_loss", *plays]):
        assert unused_settings(load(tmp_path, *others)) == []


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_sets_is_not_told_beside_another_loss_and_advantage(tmp_path: Path, preset: str) -> None:
    others = ["algorithm.loss=dppo_tv", "algorithm.advantage=rloo"]
    assert unused_settings(load(tmp_path, f"algorithm.preset={preset}", *others)) == []


@pytest.mark.parametrize("file", sorted(ROOT.glob("configs/*.yaml")), ids=lambda file: file.name)
def test_no_shipped_config_has_a_setting_without_effect(file: Path) -> None:
    assert unused_settings(load_config(file)) == []
