from __future__ import annotations

from typing import Any

import pytest
import torch

from async_rl.types import Batch
from learner.corrections import importance_weights, token_tis
from learner.diagnostics import (
    Tally,
    batch_metrics,
    explained_variance,
    offpolicy_metrics,
    policy_metrics,
    tally_critic,
    tally_offpolicy,
    tally_policy,
)
from tests.learner.handmade import make_batch, make_group, make_rollout


def test_importance_weight_diagnostics_match_the_reference_vectors(
    vectors: dict[str, Any], one_rank: None
) -> None:
    for case in vectors["is_weights"]:
        log_ratio = torch.tensor(case["log_ratio"], dtype=torch.float32).flatten()
        trained = torch.tensor(case["mask"]).flatten().bool()
        behaviour = torch.full_like(log_ratio, -2.0)
        weights = importance_weights(behaviour + log_ratio, behaviour)
        tis = torch.tensor(case["token_tis"]).flatten()
        torch.testing.assert_close(token_tis(weights, case["cap"]) * trained, tis, atol=1e-5, rtol=1e-5)
        tally = Tally()
        for part in (slice(0, 2), slice(2, None)):  # two micro-batches give what one would
            tally_offpolicy(
                tally,
                (behaviour + log_ratio)[part],
                behaviour[part],
                weights[part],
                trained[part],
                torch.zeros_like(trained[part]),
                case["cap"],
            )
        got = {metric.key: metric.value for metric in offpolicy_metrics(tally.reduce())}
        expected = {
            "offpolicy/is_weight_var": case["is_var_token"],
            "offpolicy/is_weight_max": case["rho_max"],
            "offpolicy/ess": case["ess_token_raw_over_n"],
            "offpolicy/truncated_fraction": case["truncated_frac"],
            "offpolicy/kl_behaviour_proximal": case["kl_behav_cur_k1"],
            "offpolicy/kl_behaviour_proximal_k3": case["kl_behav_cur_k3"],
        }
        assert {key: got[key] for key in expected} == pytest.approx(expected, abs=2e-6)
        assert "mismatch/mean_abs" not in got


def test_mismatch_counts_only_trained_tokens_of_the_weights_being_trained(one_rank: None) -> None:
    behaviour = torch.tensor([-1.0, -1.0, -1.0, -1.0])
    proximal = torch.tensor([-1.5, -0.75, 9.0, 9.0])
    tally = Tally()
    tally_offpolicy(
        tally,
        proximal,
        behaviour,
        importance_weights(proximal, behaviour),
        torch.tensor([True, True, False, True]),
        torch.tensor([True, True, True, False]),
        2.0,
    )
    got = {metric.key: metric.value for metric in offpolicy_metrics(tally.reduce())}
    assert got["mismatch/mean_abs"] == pytest.approx((0.5 + 0.25) / 2)


def test_clip_fractions_are_shares_of_the_tokens_with_that_sign(one_rank: None) -> None:
    tally = Tally()
    tally_policy(
        tally,
        entropy=torch.tensor([1.0, 2.0, 3.0, 100.0]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        clipped=torch.tensor([True, False, False, True]),
        trained=torch.tensor([True, True, True, False]),
    )
    got = {metric.key: metric.value for metric in policy_metrics(tally.reduce())}
    assert got == {
        "policy/entropy": 2.0,
        "offpolicy/clip_fraction_positive": 0.5,
        "offpolicy/clip_fraction_negative": 0.0,
    }


def test_explained_variance_is_one_for_the_returns_up_to_a_constant_and_zero_for_a_constant(
    one_rank: None,
) -> None:
    returns = torch.tensor([0.0, 1.0, 3.0, 50.0])
    trained = torch.tensor([True, True, True, False])
    for values, expected in ((returns - 0.5, 1.0), (torch.full((4,), 0.7), 0.0)):
        tally = Tally()
        tally_critic(tally, values, returns, trained)
        assert explained_variance(tally.reduce()) == pytest.approx(expected, abs=1e-9)


def test_staleness_splits_into_flight_and_queue_by_the_oldest_token_of_each_rollout() -> None:
    old, young = make_rollout([5, 6, 7], [-1.0] * 3, 1.0), make_rollout([5], [-1.0], 0.0, version=4)
    old.versions[:] = [2, 3, 3]
    group = make_group(0, [3, 4], [old, young], version=2)
    batch = Batch(version=5, groups=(group,), finished_versions=(4,), counters={"buffer/depth": 7.0})
    got = {metric.key: metric.value for metric in batch_metrics(batch)}
    assert got == {
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "staleness/mean": 2.0,
        "staleness/max": 3.0,
        "staleness/in_flight": 1.0,
        "staleness/in_queue": 1.0,
        "staleness/rollouts_1": 1.0,
        "staleness/rollouts_3": 1.0,
        "response/length_mean": 2.0,
        "response/length_max": 3.0,
        "response/truncated_fraction": 0.0,
        "batch/rollouts": 2.0,
        "batch/response_tokens": 4.0,
        "buffer/depth": 7.0,
    }


def test_truncated_answers_are_counted() -> None:
    batch = make_batch()
    assert {m.key: m.value for m in batch_metrics(batch)}["response/truncated_fraction"] == 0.0
