"""Metrics of a step by hand and against reference vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.base.telemetry.metrics import Metric, over_steps, reduce_metrics
from learner.algorithms.diagnostics import (
    BUCKETS,
    LENGTHS,
    MetricAccumulator,
    Totals,
    add_critic,
    add_offpolicy,
    add_policy,
    batch_metrics,
    explained_variance,
    rule_metrics,
    token_metrics,
)
from tests.kit.groups import batch_of, make_group, make_row
from tests.kit.learner.batches import make_response


def offpolicy(
    log_rho: torch.Tensor,  # [N]
    lengths: Sequence[int] = (),
    rows_apart: bool = False,
    cap: float = 2.0,
    dropped: torch.Tensor | None = None,
    **response: torch.Tensor,
) -> dict[str, float]:
    """Metrics by key; the rows may be in micro-batches of their own."""
    lengths = lengths or (len(log_rho),)
    sums = MetricAccumulator()
    sizes = list(lengths) if rows_apart else [len(log_rho)]
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        start += size
        given = {name: values[part] for name, values in response.items()}
        of_part = make_response((size,) if rows_apart else lengths, **given)
        own = log_rho[part] * of_part.trained
        drops = torch.zeros(size).bool() if dropped is None else dropped[part]
        add_offpolicy(sums, of_part, own, own.exp().clamp(max=cap), own.exp() > cap, drops)
    return {metric.key: metric.value for metric in token_metrics({**NO_POLICY, **sums.reduce()})}


POLICY_SUMS = [
    "policy_tokens", "entropy", "moved_k1", "moved_k3", "positive", "negative", "clipped_positive", "clipped_negative",
]  # fmt: skip
OFFPOLICY_SUMS = [
    "tokens", "rho", "rho_squared", "weight", "weight_squared", "truncated", "dropped", "k1", "k3", "rho_max",
]  # fmt: skip
NO_POLICY: Totals = {name: np.zeros(BUCKETS) for name in POLICY_SUMS}
LENGTH_SUMS = [f"by_length/{name}" for name in ("tokens", "staleness", "rho", "rho_squared", "truncated", "k3")]
NO_OFFPOLICY: Totals = {
    **{name: np.zeros(BUCKETS) for name in OFFPOLICY_SUMS}, **{name: np.zeros(LENGTHS) for name in LENGTH_SUMS}
}


def test_importance_weight_diagnostics_match_the_reference_vectors(
    vectors: dict[str, Any], one_rank: None
) -> None:
    for case in vectors["is_weights"]:
        log_ratio, trained = torch.tensor(case["log_ratio"]), torch.tensor(case["mask"]).bool()
        lengths = [log_ratio.shape[1]] * len(log_ratio)
        for rows_apart in (True, False):  # two micro-batches give what one does
            got = offpolicy(log_ratio.flatten(), lengths, rows_apart, case["cap"], trained=trained.flatten())
            expected = {
                "offpolicy/is_weight_var": case["is_var_token"],
                "offpolicy/is_weight_max": case["rho_max"],
                "offpolicy/ess": case["ess_token_raw_over_n"],
                "offpolicy/ess_truncated": case["ess_token_tis_over_n"],
                "offpolicy/ess_sequence": case["ess_seq_raw_over_n"],
                "offpolicy/chi2": case["chi2_token"],
                "offpolicy/chi2_sequence": case["chi2_seq"],
                "offpolicy/truncated_fraction": case["truncated_frac"],
                "offpolicy/kl_behaviour_proximal": case["kl_behav_cur_k1"],
                "offpolicy/kl_behaviour_proximal_k3": case["kl_behav_cur_k3"],
            }
            assert {key: got[key] for key in expected} == pytest.approx(expected, rel=2e-6, abs=2e-6)


def test_statistics_by_staleness_count_their_tokens_and_the_last_all_older_ones(
    one_rank: None,
) -> None:
    log_rho = torch.tensor([0.0, 0.2, 0.8, -0.5, 9.0])
    staleness = torch.tensor([0, 3, 3, 12, 0])
    trained = torch.tensor([True, True, True, True, False])
    dropped = torch.tensor([False, True, False, False, True])
    got = offpolicy(log_rho, staleness=staleness, dropped=dropped, trained=trained)
    prefixes = {key.rsplit("/", 1)[0] for key in got if key.startswith("by_staleness/")}
    assert prefixes == {"by_staleness/0", "by_staleness/3", "by_staleness/10"}
    rho = np.exp([0.2, 0.8])
    assert got["by_staleness/3/tokens"] == 2
    assert got["by_staleness/3/is_weight_mean"] == pytest.approx(rho.mean())
    assert got["by_staleness/3/is_weight_max"] == pytest.approx(rho.max())
    assert got["by_staleness/3/ess"] == pytest.approx(rho.sum() ** 2 / (2 * (rho**2).sum()))
    assert got["by_staleness/3/truncated_fraction"] == 0.5
    assert got["by_staleness/3/masked_fraction"] == 0.5
    assert got["by_staleness/10/kl_behaviour_proximal"] == pytest.approx(0.5)
    assert got["by_staleness/0/is_weight_max"] == 1.0
    assert got["offpolicy/masked_fraction"] == 0.25


@pytest.mark.parametrize(
    ("length", "bucket"),
    [(1, 1), (2, 2), (3, 2), (4, 4), (1023, 512), (1024, 1024), (2**20, 2**20), (3 * 2**20, 2**20)],
)
def test_an_episode_counts_at_the_power_of_two_up_to_its_length(length: int, bucket: int, one_rank: None) -> None:
    sums = MetricAccumulator()
    sums.add_by_length(torch.tensor([float(length)]), torch.tensor([True]), one=torch.ones(1))
    assert sums.reduce()["one"].nonzero()[0].tolist() == [round(math.log2(bucket))]


def test_the_truncated_ess_counts_tokens_that_a_mask_drops_with_weight_zero(one_rank: None) -> None:
    """Weights of 1, 1, 2 and 0 of four tokens: (1 + 1 + 2)^2 / (4 (1 + 1 + 4))."""
    log_rho = torch.tensor([1.0, 1.0, 2.0, 7.0]).log()
    got = offpolicy(log_rho, cap=math.inf, dropped=torch.tensor([False, False, False, True]))
    assert got["offpolicy/ess_truncated"] == pytest.approx(16 / 24)
    assert got["offpolicy/ess"] == pytest.approx(11**2 / (4 * 55))


def test_clip_fractions_are_shares_of_the_tokens_with_that_sign_of_advantage(
    one_rank: None,
) -> None:
    sums = MetricAccumulator()
    add_policy(
        sums,
        make_response(
            (4,), trained=torch.tensor([True, True, True, False]), staleness=torch.tensor([0, 0, 1, 1])
        ),
        logprobs=torch.tensor([-1.0, -1.5, -0.5, -9.0]),
        proximal=torch.tensor([-1.0, -1.0, -1.0, -1.0]),
        entropy=torch.tensor([1.0, 2.0, 3.0, 100.0]),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        clipped=torch.tensor([True, False, False, True]),
    )
    sums.add(**dict.fromkeys(("rows", "product", "product_squared", "old_kv"), torch.zeros(())))
    got = {metric.key: metric.value for metric in token_metrics({**NO_OFFPOLICY, **sums.reduce()})}
    k3 = (np.exp(-0.5) - 1 + 0.5 + np.exp(0.5) - 1 - 0.5) / 3
    expected = {
        "policy/entropy": 2.0,
        "offpolicy/clip_fraction_positive": 0.5,
        "offpolicy/clip_fraction_negative": 0.0,
        "offpolicy/kl_proximal_learner": 0.0,
        "offpolicy/kl_proximal_learner_k3": k3,
    }
    assert {key: got[key] for key in expected} == pytest.approx(expected, abs=1e-6)


def test_a_clip_fraction_over_steps_is_a_share_of_all_tokens_with_that_sign(one_rank: None) -> None:
    """Positive advantages: 1 of 1 token is clipped, then 0 of 3, so 1 of 4. The only negative token is clipped."""
    steps, declared = [], {}
    for advantages, clipped in (([1.0, -1.0], [True, True]), ([1.0, 1.0, 1.0], [False, False, False])):
        sums, count = MetricAccumulator(), len(advantages)
        zeros, ages = torch.zeros(count), torch.zeros(count, dtype=torch.long)
        response = make_response((count,), trained=torch.ones(count, dtype=torch.bool), staleness=ages)
        add_policy(sums, response, zeros, zeros, zeros, torch.tensor(advantages), torch.tensor(clipped))
        sums.add(**dict.fromkeys(("rows", "product", "product_squared"), torch.zeros(())))
        metrics = token_metrics({**NO_OFFPOLICY, **sums.reduce()})
        steps.append(reduce_metrics([*metrics, Metric("batch/response_tokens", count, "sum")]))
        declared |= {metric.key: metric.declaration for metric in metrics}
    figures = over_steps(steps, declared)
    assert figures.get("offpolicy/clip_fraction_positive") == pytest.approx(1 / 4)
    assert figures.get("offpolicy/clip_fraction_negative") == 1.0


def test_explained_variance_ignores_a_constant_and_is_zero_for_constant_values(
    one_rank: None,
) -> None:
    returns = torch.tensor([0.0, 1.0, 3.0, 50.0])
    trained = torch.tensor([True, True, True, False])
    for values, expected in ((returns - 0.5, 1.0), (torch.full((4,), 0.7), 0.0)):
        sums = MetricAccumulator()
        add_critic(sums, values, returns, trained)
        assert explained_variance(sums.reduce()) == pytest.approx(expected, abs=1e-9)


def test_rewards_have_their_names_and_the_buffers_numbers_are_kept() -> None:
    """The other numbers of a batch: tests/learner/test_episodes.py."""
    old, young = make_row([5, 6, 7], [-1.0] * 3, 1.0), make_row([5], [-1.0], 0.0, version=4)
    old.versions[:] = [2, 3, 3]
    named = replace(old, rewards={"right": 1.0, "right/tests": 3.0}), replace(young, rewards={"right": 0.5})
    counted = {"counters": {"buffer/trained": 9.0}, "gauges": {"buffer/depth": 7.0}}
    batch = batch_of(make_group(0, [3, 4], named, version=2), version=5, finished_versions=(4,), **counted)
    got = {metric.key: metric.value for metric in batch_metrics(batch)}
    assert (got["buffer/depth"], got["buffer/trained"]) == (7.0, 9.0)
    assert {key: value for key, value in got.items() if "right" in key} == {
        "reward/right": 0.75, "reward/right/tests": 3.0, "by_staleness/1/reward/right": 0.5,
        "by_staleness/3/reward/right": 1.0, "by_staleness/3/reward/right/tests": 3.0,
    }


def test_rule_and_model_are_compared_over_the_answers_of_a_batch() -> None:
    # 0, 1, 2, 3 by the rule and 1, 0, 3, 2 by the model: variances 1.25, covariance 0.75
    by_rule, by_model = (
        batch_of(make_group(0, [3], [make_row([5], [-1.0], reward) for reward in rewards]), version=0)
        for rewards in ((0.0, 1.0, 2.0, 3.0), (1.0, 0.0, 3.0, 2.0))
    )
    assert {m.key: m.value for m in rule_metrics(by_rule, by_model, is_gold=True)} == pytest.approx(
        {"reward/rule_mean": 1.5, "reward/rule_correlation": 0.6}
    )
    same = batch_of(make_group(0, [3], [make_row([5], [-1.0], 1.0)] * 4), version=0)
    assert [m.key for m in rule_metrics(same, by_model, is_gold=True)] == ["reward/rule_mean"]
    assert [m.key for m in rule_metrics(by_rule, by_model, is_gold=False)] == ["reward/rule_mean"]
