from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.algorithms.losses import (
    cispo_loss,
    dppo_tv_loss,
    gspo_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    ppo_clip_loss,
    value_loss,
)

LOGPROB = st.floats(-30, 0, width=32)


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=1e-9, rtol=1e-9)


def test_ppo_clip_with_and_without_dual_clip_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    duals = set()
    for case in vectors["ppo_clip"]:
        dual = case["dual_clip_c"] or 0.0
        duals.add(dual)
        logprobs, centre = double(case["logp"]), double(case["old_logp"])
        loss, clipped = ppo_clip_loss(logprobs, centre, double(case["adv"]), case["eps_low"], case["eps_high"], dual)
        close((logprobs - centre).exp(), case["ratio"])
        close(loss, case["token_loss"])
        close(loss.mean(), case["loss_mean"])
        close(clipped.double().mean(), case["clip_frac"])
    assert duals == {0.0, 3.0}


def test_cispo_and_its_gradient_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["cispo"]:
        logprobs = double(case["logp"]).requires_grad_()
        centre, advantages = double(case["old_logp"]), double(case["adv"])
        loss, clipped = cispo_loss(logprobs, centre, advantages, case["eps_low"], case["eps_high"])
        close(loss.detach(), case["token_loss"])
        close(clipped.double().mean(), case["clip_frac"])
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        if "grad_wrt_logp" in case:
            close(gradient, case["grad_wrt_logp"])
        close(-gradient / advantages, case["weight"])


def test_gspo_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["gspo"]:
        log_ratio = double(case["log_ratio"])
        trained, answers = torch.ones(len(log_ratio)).bool(), torch.zeros(len(log_ratio), dtype=torch.int64)
        advantages = torch.full_like(log_ratio, case["adv"])
        loss, clipped = gspo_loss(
            log_ratio, torch.zeros_like(log_ratio), advantages, trained, answers, 1, case["eps_low"], case["eps_high"]
        )
        close(loss, [case["seq_loss"]] * len(log_ratio))
        assert clipped.tolist() == [case["clipped"]] * len(log_ratio)
        if not case["clipped"]:
            close(-loss / advantages, [case["seq_ratio"]] * len(log_ratio))


def test_the_ratio_of_gspo_is_of_the_trained_tokens_of_its_own_answer() -> None:
    log_ratio = double([0.1, 9.0, 0.3, -0.2])
    trained, answers = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 0, 1])
    loss, _ = gspo_loss(log_ratio, double([0.0] * 4), double([1.0] * 4), trained, answers, 2, 0.9, 9.0)
    close(loss, (-double([0.2, 0.2, 0.2, -0.2]).exp()).tolist())


def test_dppo_tv_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["dppo_tv_keep"]:
        assert case["mask_low"] == case["mask_high"]
        logprobs, centre = double([case["p_trainer"]]).log(), double([case["p_behav"]]).log()
        loss, dropped = dppo_tv_loss(logprobs, centre, double([case["adv"]]), case["mask_high"], 0.0)
        assert dropped.tolist() == [not case["keep"]]
        close(loss, [-case["weight"] * case["adv"] if case["keep"] else 0.0])
    pulled, _ = dppo_tv_loss(double([-1.0]), double([-1.5]), double([0.0]), 0.2, 1e-3)
    close(pulled, [1e-3 * 0.25])


def test_value_loss_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["value_clip_loss"]:
        loss = value_loss(double(case["v"]), double(case["v_old"]), double(case["ret"]), case["clip"])
        close(loss.mean(), case["loss_half_mean"])


def test_value_clip_zero_is_half_the_squared_error() -> None:
    close(value_loss(double([3.0]), double([0.0]), double([1.0]), 0.0), [2.0])


def test_kl_estimators_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["kl"]:
        logprobs, reference = double(case["logp"]), double(case["ref_logp"])
        for name, estimator in (("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)):
            close(estimator(logprobs, reference), case[name])
            close(estimator(logprobs, reference).mean(), case[f"{name}_mean"])
        close(1.5 * kl_k3(logprobs, reference), case["k3_with_is_ratio_1p5"])


def test_expected_gradients_of_the_kl_estimators_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["kl_expected_gradient"]:
        reference = double(case["ref_probs"]).log()

        def gradient(loss_of: Callable[[Tensor], Tensor], case: dict[str, Any] = case) -> Tensor:
            logits = double(case["logits"]).requires_grad_()
            (found,) = torch.autograd.grad(loss_of(logits.log_softmax(0)), logits)
            return found

        def expected(
            estimator: Callable[[Tensor, Tensor], Tensor], reference: Tensor = reference
        ) -> Callable[[Tensor], Tensor]:
            return lambda logprobs: (logprobs.exp().detach() * estimator(logprobs, reference)).sum()

        reverse = gradient(lambda logprobs, q=reference: (logprobs.exp() * (logprobs - q)).sum())
        forward = gradient(lambda logprobs, q=reference: (q.exp() * (q - logprobs)).sum())
        probabilities = double(case["logits"]).softmax(0)
        close(probabilities, case["probs"])
        close((probabilities * (probabilities.log() - reference)).sum(), case["true_reverse_KL"])
        close(reverse, case["true_grad_reverse_KL"])
        close(forward, case["grad_forward_KL"])
        for name, estimator in (("k1", kl_k1), ("k2", kl_k2), ("k3", kl_k3)):
            close(gradient(expected(estimator)), case[f"E_grad_{name}_loss"])
        rewarded = gradient(lambda lp, q=reference: (lp.exp().detach() * kl_k1(lp, q).detach() * lp).sum())
        close(rewarded, case["true_grad_reverse_KL"])


def test_the_mean_of_both_unbiased_kl_estimators_over_the_distribution_is_the_divergence() -> None:
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


ANSWERS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
TRAINED = torch.tensor([True, True, False, True, True, True, True, False])
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ppo_clip": lambda lp, centre, adv: ppo_clip_loss(lp, centre, adv, 0.2, 0.28, 0.0)[0],
    "ppo_dual_clip": lambda lp, centre, adv: ppo_clip_loss(lp, centre, adv, 0.2, 0.28, 3.0)[0],
    "gspo": lambda lp, centre, adv: gspo_loss(lp, centre, adv, TRAINED, ANSWERS, 3, 0.2, 0.28)[0],
    "dppo_tv": lambda lp, centre, adv: dppo_tv_loss(lp, centre, adv, 0.2, 1e-3)[0],
    "k1": lambda lp, centre, adv: kl_k1(lp, centre),
    "k2": lambda lp, centre, adv: kl_k2(lp, centre),
    "k3": lambda lp, centre, adv: kl_k3(lp, centre),
    "value": lambda lp, centre, adv: value_loss(lp, centre, adv, 0.2),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_finite_differences(name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    centre = -2 * torch.rand(8, generator=generator, dtype=torch.float64) - 0.05
    logprobs = (centre + 0.4 * torch.randn(8, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
    advantages = torch.randn(8, generator=generator, dtype=torch.float64)[ANSWERS]
    loss = LOSSES[name]
    assert torch.autograd.gradcheck(lambda lp: loss(lp, centre, advantages), logprobs.requires_grad_(), eps=1e-7)


@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_cispo_is_that_of_finite_differences_with_its_weight_held(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, centre, advantages = torch.randn(3, 8, generator=generator, dtype=torch.float64).sub(3)
    weight = (logprobs - centre).exp().clamp(0, 5)
    (gradient,) = torch.autograd.grad(
        cispo_loss(logprobs.requires_grad_(), centre, advantages, 1.0, 4.0)[0].sum(), logprobs
    )
    step = 1e-6
    for i in range(8):
        moved = [(logprobs.detach()[i] + sign * step) * -weight[i] * advantages[i] for sign in (1, -1)]
        assert float(gradient[i]) == pytest.approx(float((moved[0] - moved[1]).detach() / (2 * step)), rel=1e-6)
