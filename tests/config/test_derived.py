"""What follows from several settings together."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from async_rl.base.config import Config, ModelConfig, WeightSyncConfig
from async_rl.base.config.check import SettingsError
from async_rl.base.config.learning import default_lr
from async_rl.base.config.loading import load_config
from async_rl.base.config.weight_sync import check_sending
from async_rl.base.seams import TRANSPORTS
from tests.kit.configs import make_config

FILE = "model: {path: models/x}\ntask: {name: reasoning_gym/spell_backward}\n"


def load(tmp_path: Path, *overrides: str) -> Config:
    (tmp_path / "config.yaml").write_text(FILE)
    return load_config(tmp_path / "config.yaml", overrides)


def test_slots_follow_from_the_fresh_share_of_a_batch(tmp_path: Path) -> None:
    config = load(tmp_path, "staleness.max=2", "buffer.max_uses=3", "buffer.fresh_fraction=0.35")
    assert (config.fresh_per_step, config.slots) == (6, 18)  # ceil(0.35 * 16) of 16
    assert load(tmp_path, "staleness.max=8", "staleness.depth=1.25").slots == 36
    at_pushes = load(tmp_path, "staleness.max=8", "staleness.depth=2", "weight_sync.every_steps=3")
    assert (at_pushes.slots, at_pushes.slot_limits.fewest) == (48, 48)


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        (["checkpoint.every_steps=0"], 100), (["checkpoint.every_steps=200"], 400),
        (["checkpoint.every_steps=50", "buffer.journal_keep_steps=0"], 100),
        (["checkpoint.every_steps=0", "buffer.journal_keep_steps=0"], 1),  # for the checkpoint of Ctrl-C
        (["checkpoint.every_steps=50", "buffer.journal_keep_steps=300"], 300), (["buffer.journal_keep_steps=-1"], -1),
    ],
)
def test_the_journal_keeps_tokens_until_the_checkpoint_after_next_whatever_is_set(
    tmp_path: Path, overrides: list[str], kept: int
) -> None:
    assert load(tmp_path, *overrides).journal_kept_steps == kept


def test_only_group_normalised_advantages_drop_groups_of_equal_rewards(tmp_path: Path) -> None:
    assert load(tmp_path).drops_zero_variance
    assert not load(tmp_path, "algorithm.filter_zero_variance=false").drops_zero_variance
    for advantage in ("gae", "remax", "reinforce_pp", "tests.config.test_refused:ADVANTAGE"):
        assert not load(tmp_path, f"algorithm.advantage={advantage}").drops_zero_variance


def test_a_range_of_servers_names_all_that_may_join(tmp_path: Path) -> None:
    config = load(
        tmp_path, "placement.rollout.servers={min: 2, max: 3}", "placement.eval.servers=1", "eval.every_steps=5"
    )
    placed = config.placement.rollout
    assert (placed.is_elastic, placed.fewest, placed.most, config.placement.num_servers) == (True, 2, 3, 4)
    assert config.server_names == ("rollout/0", "rollout/1", "rollout/2", "eval/0") and len(config.engines) == 4
    fixed = load(tmp_path, "placement.rollout.servers=2").placement.rollout
    assert (fixed.is_elastic, fixed.fewest, fixed.most) == (False, 2, 2)


@pytest.mark.parametrize(("limit", "longest"), [(0, 528), (1000, 1000), (512, 512), (100, 100)])
def test_an_episode_is_as_long_as_its_limit_says(
    tmp_path: Path, limit: int, longest: int
) -> None:
    config = load(
        tmp_path, "task.name=", "task.env=my_games:Game", "rollout.max_response_tokens=16",
        f"rollout.max_episode_tokens={limit}",
    )
    assert config.longest_tokens == config.longest_response_tokens == longest


def test_a_sparse_push_is_refused_where_auto_gives_float32() -> None:
    sparse = dataclasses.replace(make_config(), weight_sync=WeightSyncConfig(delta=True))
    check_sending(sparse, TRANSPORTS, "cuda")
    check_sending(dataclasses.replace(sparse, model=ModelConfig(path="none", dtype="bfloat16")), TRANSPORTS, "cpu")
    with pytest.raises(SettingsError, match=r"^weight_sync\.delta"):
        check_sending(sparse, TRANSPORTS, "cpu")


@pytest.mark.parametrize(
    ("weights", "has_adapters", "rate"),
    [
        (7_000_000_000, False, 1e-6), (1_000_000_000, False, 1e-6), (7_000_000_000, True, 1e-5),
        # 1e-6 * 2 ** 0.7 = 1.62e-6; 7.43 ** 0.7 = 4.07; 3333 ** 0.7 = 292
        (500_000_000, False, 1.6e-6), (134_500_000, False, 4.1e-6), (300_000, False, 2.9e-4), (300_000, True, 2.9e-3),
    ],
)
def test_the_learning_rate_falls_with_the_weights_and_is_higher_for_adapters(
    weights: int, has_adapters: bool, rate: float
) -> None:
    assert math.isclose(default_lr(weights, has_adapters=has_adapters), rate, rel_tol=1e-9)
