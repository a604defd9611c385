"""Settings that nothing would read are refused, and say what would read them; defaults and presets are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.config.presets import PRESETS
from async_rl.errors import ConfigError

FILE = "model: {path: models/x}\ntask: {name: reasoning_gym/spell_backward}\n"


def load(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "config.yaml").write_text(FILE)
    return load_config(tmp_path / "config.yaml", overrides)


@pytest.mark.parametrize(
    ("setting", "without", "with_effect", "message"),
    [
        (
            "algorithm.correction.batch_normalised=true", ["algorithm.advantage=vtrace", "staleness.max=2"],
            ["staleness.max=2"], "must be false with algorithm.advantage vtrace, got True (command line). There are no",
        ),
        (
            "algorithm.clip.high=0.5", ["algorithm.loss=dppo_tv"], ["algorithm.loss=cispo"],
            "must be 0.28, its default, with algorithm.loss dppo_tv, got 0.5 (command line). The loss does not read it",
        ),
        (
            "algorithm.clip.low=0.1", ["algorithm.preset=dppo_tv"], ["algorithm.loss=ppo_clip"],
            "must be 0.2, its default, with algorithm.loss dppo_tv, got 0.1 (command line). The loss does not read it",
        ),
        (
            "algorithm.lam=0.5", ["algorithm.advantage=reinforce_pp"], ["algorithm.advantage=vtrace"],
            "must be 0.95, its default, with algorithm.advantage reinforce_pp, got 0.5 (command line). Only gae, ",
        ),
        (
            "critic.path=models/critic", [], ["algorithm.advantage=gae"],
            "must be empty with algorithm.advantage grpo, got 'models/critic' (command line). Nothing would use it.",
        ),
        (
            "learner.decay=cosine", [], ["learner.decay_fraction=0.5"],
            "must be linear, its default, with learner.decay_fraction 0, got 'cosine' (command line). No learning rate",
        ),
        (
            "learner.decay_to=0.1", ["learner.decay_fraction=0"], ["learner.decay_fraction=1"],
            "must be 0.0, its default, with learner.decay_fraction 0, got 0.1 (command line). No learning rate falls",
        ),
    ],
)
def test_a_setting_is_refused_where_nothing_reads_it_and_taken_where_it_is_read(
    tmp_path: Path, setting: str, without: list[str], with_effect: list[str], message: str
) -> None:
    load(tmp_path, *without)
    load(tmp_path, *with_effect, setting)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *without, setting)
    assert str(caught.value).startswith(f"{setting.partition('=')[0]} {message}")


@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_sets_is_taken_beside_another_loss_and_advantage(tmp_path: Path, preset: str) -> None:
    others = ["algorithm.loss=dppo_tv", "algorithm.advantage=rloo"]
    config = load(tmp_path, f"algorithm.preset={preset}", *others)
    assert (config.algorithm.clip.high, config.algorithm.lam) == (
        PRESETS[preset].get("clip", {}).get("high", 0.28), PRESETS[preset].get("lam", 0.95),
    )


def test_settings_that_a_part_of_a_sweep_does_not_use_are_taken(tmp_path: Path) -> None:
    load(tmp_path, "staleness.max=0", "algorithm.correction.batch_normalised=true")
    load(tmp_path, "critic.warmup_steps=10", "critic.lr=1e-3")
