from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.advantages import gae, group_advantages

REWARDS = st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=16)


def test_group_advantages_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["group_advantage"]:
        got = group_advantages(torch.tensor(case["rewards"], dtype=torch.float64))
        torch.testing.assert_close(
            got, torch.tensor(case["grpo_std_ddof1_eps1e-6"], dtype=torch.float64), atol=1e-9, rtol=0
        )


def test_a_group_of_equal_rewards_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([0.5, 0.5, 0.5])).tolist() == [0.0, 0.0, 0.0]


@given(REWARDS)
def test_group_advantages_add_up_to_zero_and_keep_the_order_of_rewards(rewards: list[float]) -> None:
    x = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(x)
    assert abs(float(advantages.sum())) < 1e-6
    assert torch.equal(x[advantages.argsort()].sort().values, x.sort().values)
    assert float(((x[:, None] - x) * (advantages[:, None] - advantages)).min()) >= 0


def test_gae_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["gae"]:
        rewards, values = (torch.tensor([case[key]], dtype=torch.float64) for key in ("rewards", "values"))
        mask = torch.ones_like(values, dtype=torch.bool)
        advantages, returns = gae(rewards, values, mask, case["gamma"], case["lam"], case["bootstrap"])
        for got, key in ((advantages, "advantages"), (returns, "returns")):
            torch.testing.assert_close(
                got[0], torch.tensor(case[key], dtype=torch.float64), atol=1e-9, rtol=0
            )


@given(st.integers(0, 2**16), st.floats(0.5, 1), st.floats(0, 1))
def test_tokens_that_are_not_trained_leave_the_others_advantages_as_if_they_were_not_there(
    seed: int, gamma: float, lam: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(1, 8, generator=generator) < 0.6
    values = torch.randn(1, 8, generator=generator)
    rewards = torch.randn(1, 8, generator=generator) * mask
    whole, _ = gae(rewards, values, mask, gamma, lam)
    kept = mask[0]
    if kept.any():
        alone, _ = gae(rewards[:, kept], values[:, kept], mask[:, kept], gamma, lam)
        torch.testing.assert_close(whole[:, kept], alone)
    assert not whole[:, ~kept].any()


def test_lambda_one_and_gamma_one_give_the_return_minus_the_value() -> None:
    values = torch.tensor([[0.3, -0.2, 0.9]])
    rewards = torch.tensor([[0.0, 0.5, 1.0]])
    advantages, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[1.5, 1.5, 1.0]]))
    torch.testing.assert_close(advantages, torch.tensor([[1.2, 1.7, 0.1]]))
