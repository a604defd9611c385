"""Advantages go to the tokens that the model sampled, whatever tokens are between them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.base.config import AlgorithmConfig
from async_rl.base.types import Batch
from learner.algorithms.advantages import batch_advantages, critic_advantages, gae, penalty_to_go
from learner.packing import Layout, MicroBatch, collate, make_pieces
from tests.kit.configs import learner_config
from tests.kit.groups import batch_of, make_group, make_row

TURNS = [True, True, False, False, True, False, True]
"""Two tokens of the assistant, two of the environment, and so on."""


def multi_turn_batch() -> Batch:
    rows = [make_row(range(3, 3 + len(TURNS)), [-1.0] * len(TURNS), float(reward)) for reward in (1, 0)]
    for row in rows:
        row.mask[:] = TURNS
    return batch_of(make_group(0, [3, 4], rows))


def advantages_of(batch: Batch, tmp_path: Path, **algorithm: Any) -> list[list[np.ndarray]]:
    return batch_advantages(learner_config(tmp_path / "none", algorithm=AlgorithmConfig(**algorithm)), batch)


@pytest.mark.parametrize(
    "advantage", ["grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce_pp", "reinforce_pp_baseline"]
)
def test_only_assistant_tokens_of_a_multi_turn_rollout_get_an_advantage(advantage: str, tmp_path: Path) -> None:
    ((good, bad),) = advantages_of(multi_turn_batch(), tmp_path, advantage=advantage)
    assert (good > 0).tolist() == TURNS and (bad < 0).tolist() == TURNS
    assert len(set(good[TURNS])) == 1


def test_any_advantage_is_whitened_on_request(tmp_path: Path) -> None:
    ((good, bad),) = advantages_of(multi_turn_batch(), tmp_path, advantage="dr_grpo", whiten=True)
    ((expected_good, expected_bad),) = advantages_of(multi_turn_batch(), tmp_path, advantage="reinforce_pp_baseline")
    assert np.array_equal(good, expected_good) and np.array_equal(bad, expected_bad)
    ((plain, _),) = advantages_of(multi_turn_batch(), tmp_path, advantage="dr_grpo")
    assert not np.array_equal(good, plain)


def test_a_discounted_return_counts_assistant_tokens_only(tmp_path: Path) -> None:
    batch = multi_turn_batch()
    ((good, bad),) = advantages_of(batch, tmp_path, advantage="reinforce_pp", gamma=0.5)
    returns = np.array([0.125, 0.25, 0, 0, 0.5, 0, 1.0])
    kept = np.concatenate([returns[TURNS], np.zeros(4)])
    expected = (returns - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    assert good[TURNS] == pytest.approx(expected[TURNS], abs=1e-6)
    assert bad[TURNS] == pytest.approx([-kept.mean() / kept.std(ddof=1)] * 4, abs=1e-6)
    assert not good[~np.array(TURNS)].any()


def test_remax_measures_against_the_greedy_answer_of_the_same_prompt(tmp_path: Path) -> None:
    rows = [make_row([5, 6], [-1.0] * 2, reward) for reward in (1.0, 0.25)]
    groups = []
    for index, baseline in enumerate((0.0, 1.0)):
        group = make_group(index, [3], rows)
        groups.append(dataclasses.replace(group, baseline_reward=baseline))
    batch = batch_of(*groups)
    got = advantages_of(batch, tmp_path, advantage="remax")
    assert [[float(a[0]) for a in group] for group in got] == [[1.0, 0.25], [0.0, -0.75]]


def collated() -> MicroBatch:
    batch = multi_turn_batch()
    pieces = make_pieces(batch.groups, [(0, 0), (0, 1)], 100, 2, Layout(masked=True))
    zeros = [[np.zeros(len(TURNS), np.float32)] * 2]
    return collate(batch, [[piece] for piece in pieces], zeros, torch.device("cpu"))


def test_gae_gives_the_reward_at_the_last_assistant_token_and_skips_other_tokens(tmp_path: Path) -> None:
    micro = collated()
    values, penalty = torch.linspace(0, 1, 14), torch.full((14,), 0.1) * micro.response.trained
    config = learner_config(tmp_path / "none", algorithm=AlgorithmConfig(advantage="gae", gamma=0.9, gae_lambda=0.8))
    got, returns = critic_advantages(config, gae, micro.response, values, torch.zeros(14), penalty)
    kept = torch.tensor(TURNS)
    for index, reward in enumerate((1.0, 0.0)):
        part = slice(7 * index, 7 * index + 7)
        own = values[part][kept][None]
        rewards = torch.tensor([[-0.1, -0.1, -0.1, reward - 0.1]])
        expected, targets = gae(rewards, own, torch.zeros(1, 4), torch.ones(1, 4).bool(), 0.9, 0.8)
        torch.testing.assert_close(got[part][kept], expected[0])
        torch.testing.assert_close(returns[part][kept], targets[0])
        assert not got[part][~kept].any()


def test_a_penalty_reaches_back_to_the_tokens_before_it_within_its_answer() -> None:
    penalty = torch.tensor([1.0, 2, 0, 0, 4, 0, 8, *[0] * 7])
    assert penalty_to_go(penalty, collated().response, 1.0).tolist() == [15, 14, 0, 0, 12, 0, 8, *[0] * 7]


def test_with_a_critic_the_advantages_follow_from_values_later(tmp_path: Path) -> None:
    ((good, bad),) = advantages_of(multi_turn_batch(), tmp_path, advantage="gae")
    assert not good.any() and not bad.any()
