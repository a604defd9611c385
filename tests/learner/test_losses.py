from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.corrections import importance_weights, token_tis
from learner.losses import kl_k1, kl_k3, ppo_clip_loss, value_loss

LOGPROB = st.floats(-30, 0, width=32)


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=1e-6, rtol=1e-6)


def test_ppo_clip_with_and_without_dual_clip_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    duals = set()
    for case in vectors["ppo_clip"]:
        dual = case["dual_clip_c"] or 0.0
        duals.add(dual)
        loss, clipped = ppo_clip_loss(
            double(case["logp"]),
            double(case["old_logp"]),
            double(case["adv"]),
            case["eps_low"],
            case["eps_high"],
            dual,
        )
        close(loss, case["token_loss"])
        close(loss.mean(), case["loss_mean"])
        close(clipped.double().mean(), case["clip_frac"])
    assert duals == {0.0, 3.0}


def test_decoupled_loss_with_truncated_weights_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    (case,) = [case for case in vectors["decoupled_ppo_tis"] if case["mode"] == "truncate"]
    weights = importance_weights(double(case["prox_logp"]), double(case["behav_logp"]))
    close(weights, case["rho"])
    close(token_tis(weights, case["threshold"]), case["weight"])
    loss, _ = ppo_clip_loss(
        double(case["logp"]), double(case["prox_logp"]), double(case["adv"]), case["eps"], case["eps"], 0.0
    )
    loss = loss * token_tis(weights, case["threshold"])
    close(loss, case["token_loss"])
    close(loss.mean(), case["loss_mean_original_denominator"])


def test_value_loss_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    case = vectors["value_clip_loss"]
    cases = case if isinstance(case, list) else [case]
    for case in cases:
        loss = value_loss(double(case["v"]), double(case["v_old"]), double(case["ret"]), case["clip"])
        close(loss.mean(), case["loss_half_mean"])


def test_value_clip_zero_is_half_the_squared_error() -> None:
    close(value_loss(double([3.0]), double([0.0]), double([1.0]), 0.0), [2.0])


def test_kl_estimators_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["kl"]:
        close(kl_k1(double(case["logp"]), double(case["ref_logp"])), case["k1"])
        close(kl_k3(double(case["logp"]), double(case["ref_logp"])), case["k3"])


def test_the_mean_of_both_kl_estimators_over_the_whole_distribution_is_the_kl_divergence() -> None:
    p, q = double([0.7, 0.2, 0.1]), double([0.3, 0.3, 0.4])
    exact = float((p * (p / q).log()).sum())
    for estimator in (kl_k1, kl_k3):
        assert abs(float((p * estimator(p.log(), q.log())).sum()) - exact) < 1e-12


@given(LOGPROB, LOGPROB, st.floats(-3, 3, width=32))
def test_a_token_has_no_gradient_where_it_is_clipped_and_a_ratio_of_one_never_is(
    logprob: float, proximal: float, advantage: float
) -> None:
    learner = double([logprob]).requires_grad_()
    loss, clipped = ppo_clip_loss(learner, double([proximal]), double([advantage]), 0.2, 0.28, 0.0)
    loss.sum().backward()
    if clipped.item():
        assert learner.grad is not None and learner.grad.item() == 0
        assert logprob != proximal
    ratio = min(max(logprob - proximal, -20.0), 20.0)
    moved_far = (advantage > 0 and ratio > 0.247) or (advantage < 0 and ratio < -0.2232)
    assert bool(clipped.item()) == moved_far


@given(LOGPROB, LOGPROB, st.floats(-3, -0.125, width=32))
def test_dual_clip_bounds_the_loss_of_a_bad_token(logprob: float, proximal: float, advantage: float) -> None:
    loss, _ = ppo_clip_loss(double([logprob]), double([proximal]), double([advantage]), 0.2, 0.28, 3.0)
    assert loss.item() <= 3.0 * abs(advantage) + 1e-12


@given(LOGPROB, LOGPROB, st.floats(0.5, 10))
def test_importance_weights_are_finite_detached_and_capped(
    proximal: float, behaviour: float, cap: float
) -> None:
    weights = importance_weights(double([proximal]).requires_grad_(), double([behaviour]))
    assert not weights.requires_grad and weights.dtype == torch.float32
    assert torch.isfinite(weights).all()
    assert 0 < float(token_tis(weights, cap)) <= cap + 1e-6


def test_the_expected_truncated_weight_with_cap_one_is_one_minus_the_total_variation() -> None:
    behaviour, proximal = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    weights = token_tis(importance_weights(proximal.log(), behaviour.log()), 1.0)
    assert abs(float((behaviour * weights).sum()) - (1 - 0.3)) < 1e-6
