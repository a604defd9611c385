from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms.advantages import (
    dr_grpo,
    gae,
    grpo,
    maxrl,
    opo,
    remax,
    returns_to_go,
    rloo,
    vtrace,
    whiten,
)


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: Any, atol: float = 1e-9) -> None:
    torch.testing.assert_close(got, double(expected), atol=atol, rtol=1e-9)


def test_advantages_within_a_group_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["group_advantage"]:
        rewards = double(case["rewards"])
        close(grpo(rewards), case["grpo_std_ddof1_eps1e-6"])
        close(grpo(rewards, ddof=0), case["grpo_std_ddof0_eps1e-6"])
        close(grpo(rewards, eps=1e-4), case["grpo_std_ddof1_eps1e-4"])
        close(dr_grpo(rewards), case["dr_grpo"])
        close(rloo(rewards), case["rloo"])
        close(dr_grpo(rewards) * len(rewards) / (len(rewards) - 1), case["rloo_eq_scaled"])
        close(maxrl(rewards), case["maxrl_mean_normalised"])


def test_remax_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["remax"]:
        close(remax(double([case["reward"]]), case["greedy_reward"]), [case["adv"]])


def test_reinforce_pp_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["reinforce_pp"]:
        mask = double(case["mask"]).bool()
        last = double([[0, 0, 1], [0, 1, 0], [0, 1, 0]])
        returns = returns_to_go(double(case["returns"])[:, :1] * last, mask, case["gamma"])
        close(returns, case["returns"])
        close(whiten(returns, mask, ddof=0), case["adv_population_var"])
        close(whiten(returns, mask, ddof=1), case["adv_unbiased_var"])


def test_reinforce_pp_with_baseline_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["reinforce_pp_baseline"]:
        centred = torch.cat([dr_grpo(double(group)) for group in case["groups"]])
        # The vector adds its 1e-8 to the deviation, `whiten` to the variance.
        close(whiten(centred, torch.ones_like(centred).bool(), ddof=0), case["adv"], atol=1e-7)


@pytest.mark.parametrize("estimator", [grpo, dr_grpo, rloo, maxrl])
def test_a_group_of_equal_rewards_has_no_advantage(estimator: Any) -> None:
    assert estimator(torch.tensor([0.5, 0.5, 0.5])).tolist() == [0.0, 0.0, 0.0]
    assert estimator(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


def test_the_length_weighted_baseline_by_hand() -> None:
    """b = (1 * 1 + 3 * 0 + 4 * 0.5) / 8 = 0.375. With equal lengths it is the mean; no length, no say."""
    rewards = double([1.0, 0.0, 0.5])
    close(opo(rewards, double([1, 3, 4])), [0.625, -0.375, 0.125])
    close(opo(rewards, double([7, 7, 7])), dr_grpo(rewards).tolist())
    close(opo(rewards, double([5, 0, 5])), [0.25, -0.75, -0.25])
    assert opo(double([0.5, 0.5]), double([3, 400])).tolist() == [0.0, 0.0]


@given(st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(1, 32_000)), min_size=2, max_size=16))
def test_the_length_weighted_baseline_has_the_least_variance_of_all(rows: list[tuple[float, int]]) -> None:
    """With one gradient a token, as long as the others and not aligned, the variance goes with sum_i L_i A_i^2."""
    rewards, lengths = double([reward for reward, _ in rows]), double([length for _, length in rows])
    advantages = opo(rewards, lengths)
    assert abs(float((lengths * advantages).sum())) <= 1e-9 * float(lengths.sum()) * 10
    least = float((lengths * advantages**2).sum())
    for baseline in (0.0, float(rewards.mean()), *rewards.tolist()):
        assert float((lengths * (rewards - baseline) ** 2).sum()) >= least * (1 - 1e-9) - 1e-9
    close(opo(2 * rewards + 1, lengths), (2 * advantages).tolist(), atol=1e-7)


def test_gae_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["gae"]:
        rewards, values = double([case["rewards"]]), double([case["values"]])
        mask = torch.ones_like(values, dtype=torch.bool)
        advantages, returns = gae(
            rewards, values, torch.zeros_like(values), mask, case["gamma"], case["lam"], case["bootstrap"]
        )
        close(advantages[0], case["advantages"])
        close(returns[0], case["returns"])


def test_vtrace_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["vtrace"]:
        log_ratios = double([case["logp"]]) - double([case["behav_logp"]])
        close(log_ratios.exp()[0], case["rho"])
        values = double([case["values"]])
        advantages, targets = vtrace(
            double([case["rewards"]]), values, log_ratios, torch.ones_like(values).bool(), case["gamma"], case["lam"],
            case["rho_bar"], case["c_bar"], case["bootstrap"],
        )  # fmt: skip
        close(targets[0], case["vs"])
        close((targets - values)[0], case["vs_minus_v"])
        close(advantages[0], case["pg_advantage_clip_rho_bar"])
