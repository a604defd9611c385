"""Losses and KL estimators against reference vectors, numbers worked out by hand, and finite differences."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.base.config.algorithm import (
    ClipConfig,
    DppoKlSettings,
    DppoTvSettings,
    SatSettings,
    ScoreCenteringSettings,
)
from learner.algorithms.losses import (
    Heads,
    LossInputs,
    binary_kl,
    cispo_loss,
    dppo_kl_loss,
    dppo_tv_loss,
    gspo_loss,
    kl_k1,
    kl_k2,
    kl_k3,
    ppo_clip_loss,
    sat_loss,
    score_centering_loss,
    value_loss,
)
from learner.stages.reward_training import bradley_terry, comparison_metrics


def double(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: Tensor, expected: Any) -> None:
    torch.testing.assert_close(got, torch.as_tensor(expected, dtype=got.dtype), atol=1e-9, rtol=1e-9)


def inputs(logprobs: Tensor, centre: Tensor, advantages: Tensor, **given: Any) -> LossInputs:
    """Inputs of a loss, by default all trained and of one row; other keys are those of the clip."""
    n = len(logprobs)
    own = {key: given.pop(key) for key in ("trained", "rows", "count", "heads") if key in given}
    defaults = {"trained": torch.ones(n).bool(), "rows": torch.zeros(n, dtype=torch.int64), "count": 1}
    return LossInputs(
        logprobs=logprobs, centre=centre, advantages=advantages, clip=ClipConfig(**given),
        **defaults | own,
    )  # fmt: skip


def test_ppo_clip_with_and_without_dual_clip_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    duals = set()
    for case in vectors["ppo_clip"]:
        dual = case["dual_clip_c"] or 0.0
        duals.add(dual)
        logprobs, centre = double(case["logp"]), double(case["old_logp"])
        x = inputs(logprobs, centre, double(case["adv"]), low=case["eps_low"], high=case["eps_high"], dual=dual)
        output = ppo_clip_loss(x)
        close((logprobs - centre).exp(), case["ratio"])
        close(output.loss, case["token_loss"])
        close(output.loss.mean(), case["loss_mean"])
        close(output.clipped.double().mean(), case["clip_frac"])
    assert duals == {0.0, 3.0}


def test_cispo_and_its_gradient_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["cispo"]:
        logprobs = double(case["logp"]).requires_grad_()
        centre, advantages = double(case["old_logp"]), double(case["adv"])
        output = cispo_loss(inputs(logprobs, centre, advantages, low=case["eps_low"], high=case["eps_high"]))
        close(output.loss.detach(), case["token_loss"])
        close(output.clipped.double().mean(), case["clip_frac"])
        (gradient,) = torch.autograd.grad(output.loss.sum(), logprobs)
        if "grad_wrt_logp" in case:
            close(gradient, case["grad_wrt_logp"])
        close(-gradient / advantages, case["weight"])


def test_gspo_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["gspo"]:
        log_ratio = double(case["log_ratio"])
        advantages = torch.full_like(log_ratio, case["adv"])
        output = gspo_loss(
            inputs(log_ratio, torch.zeros_like(log_ratio), advantages, low=case["eps_low"], high=case["eps_high"])
        )
        close(output.loss, [case["seq_loss"]] * len(log_ratio))
        assert output.clipped.tolist() == [case["clipped"]] * len(log_ratio)
        if not case["clipped"]:
            close(-output.loss / advantages, [case["seq_ratio"]] * len(log_ratio))


def test_the_ratio_of_gspo_is_of_the_trained_tokens_of_its_own_answer() -> None:
    log_ratio = double([0.1, 9.0, 0.3, -0.2])
    trained, rows = torch.tensor([True, False, True, True]), torch.tensor([0, 0, 0, 1])
    x = inputs(
        log_ratio, double([0.0] * 4), double([1.0] * 4), trained=trained, rows=rows, count=2, low=0.9, high=9.0
    )
    close(gspo_loss(x).loss, (-double([0.2, 0.2, 0.2, -0.2]).exp()).tolist())


def test_dppo_tv_matches_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["dppo_tv_keep"]:
        assert case["mask_low"] == case["mask_high"]
        logprobs, centre = double([case["p_trainer"]]).log(), double([case["p_behav"]]).log()
        settings = DppoTvSettings(tv=case["mask_high"], tv_pull=0.0)
        output = dppo_tv_loss(inputs(logprobs, centre, double([case["adv"]])), settings)
        assert output.clipped.tolist() == [not case["keep"]]
        close(output.loss, [-case["weight"] * case["adv"] if case["keep"] else 0.0])
    settings = DppoTvSettings(tv=0.2, tv_pull=1e-3)
    pulled = dppo_tv_loss(inputs(double([-1.0]), double([-1.5]), double([0.0])), settings)
    close(pulled.loss, [1e-3 * 0.25])


def test_the_binary_kl_and_the_tokens_that_dppo_kl_keeps_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["divergence_masks"]:
        logprobs, centre, advantages = (double(case[key]) for key in ("logp", "logq", "advantages"))
        for got, expected in (
            (binary_kl(logprobs, centre), case["binary_kl_pq"]), (binary_kl(centre, logprobs), case["binary_kl_qp"])
        ):
            torch.testing.assert_close(got, double(expected), atol=2e-7, rtol=1e-5)  # these were made in float32
        x = inputs(logprobs, centre, advantages)
        output = dppo_kl_loss(x, DppoKlSettings(kl=case["dppo_kl_limit"]))
        kept = torch.tensor(case["dppo_kl_keeps"])
        assert output.clipped.tolist() == (~kept).tolist() and 0 < int(kept.sum()) < len(kept)
        close(output.loss, torch.where(kept, -(logprobs - centre).exp() * advantages, 0.0))


def test_the_binary_kl_is_that_worked_out_by_hand_and_finite_at_the_ends() -> None:
    """0.5 ln 2 + 0.5 ln(2 / 3) = 0.143841 and 0.25 ln 0.5 + 0.75 ln 1.5 = 0.130812."""
    half, quarter = double([0.5]).log(), double([0.25]).log()
    got = torch.cat([binary_kl(half, quarter), binary_kl(quarter, half)])
    torch.testing.assert_close(got, double([0.143841, 0.130812]), atol=1e-6, rtol=0)
    ends = torch.tensor([0.0, -200.0, -1e-9])  # in float32
    assert torch.isfinite(binary_kl(ends, ends.flip(0))).all() and (binary_kl(ends, ends) == 0).all()


def test_the_bounds_of_sat_match_the_reference_vectors(vectors: dict[str, Any]) -> None:
    for case in vectors["divergence_masks"]:
        logprobs, centre, advantages = (double(case[key]) for key in ("logp", "logq", "advantages"))
        low, high = double(case["sat_low"]), double(case["sat_high"])
        eps = case["eps"]
        assert (low > 1 - eps + 1e-6).any() or (high < 1 + eps - 1e-6).any()
        ratio = (logprobs - centre).exp()
        expected = torch.maximum(-ratio * advantages, -torch.clamp(ratio, low, high) * advantages)
        x = inputs(logprobs, centre, advantages, low=eps, high=eps)
        torch.testing.assert_close(
            sat_loss(x, SatSettings(quantile=case["sat_quantile"])).loss, expected, atol=1e-6, rtol=1e-6
        )


def test_sat_shrinks_the_interval_of_the_furthest_tokens_alone() -> None:
    """|d| is 0.1, 0.2, 0.3, 0.4 of the trained tokens: the quantile 2/3 is 0.3, and c of the last is 1 / (1 + 16/9)."""
    d = double([0.1, -0.2, 0.3, 0.4, 5.0])
    trained = torch.tensor([True] * 4 + [False])
    x = inputs(d, torch.zeros_like(d), double([1.0, -1.0, 1.0, 1.0, 1.0]), trained=trained, low=0.5, high=0.5)
    settings = SatSettings(quantile=2 / 3)
    shrunk = 1 + 0.5 / (1 + 16 / 9)
    close(sat_loss(x, settings).loss[:4], [-math.exp(0.1), math.exp(-0.2), -math.exp(0.3), -shrunk])
    fixed = dataclasses.replace(x, logprobs=torch.zeros_like(d))
    assert not sat_loss(fixed, settings).clipped.any()  # no token has moved: nothing shrinks
    untrained = dataclasses.replace(x, trained=torch.zeros_like(trained))
    assert sat_loss(untrained, settings).loss.isfinite().all()


def centered(
    logits: Tensor, q: Tensor, head: Tensor, cap: float, *, are_whole: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return (expected gradient [V] of the logits under an advantage of 1, the loss of the advantages [V]).

    Each of the V tokens is sampled once, with the logits [V] and the sampler's probabilities q [V]; head holds ids.
    """
    count = len(q)

    def loss(advantages: Tensor) -> Tensor:
        logprobs = logits.log_softmax(0)
        heads = Heads(
            logprobs=logprobs[head].repeat(count), behaviour=q[head].log().repeat(count),
            tokens=torch.arange(count).repeat_interleave(len(head)), are_whole=are_whole,
        )
        x = inputs(logprobs, q.log(), advantages, heads=heads)
        return score_centering_loss(x, ScoreCenteringSettings(cap=cap)).loss.sum()

    (gradient,) = torch.autograd.grad(loss(q), logits)  # E_q of a loss that is linear in A
    return gradient, loss


@pytest.mark.parametrize("cap", [0.0, 2.0, math.inf])
@pytest.mark.parametrize("seed", range(3))
def test_a_constant_advantage_has_no_expected_gradient_once_scores_are_centered(cap: float, seed: int) -> None:
    """It has none if the head is the whole support, or if the sampler's tail is proportional to the learner's."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(12, generator=generator, dtype=torch.float64).requires_grad_()
    q = torch.randn(12, generator=generator, dtype=torch.float64).mul(1.5).softmax(0)
    order = q.argsort(descending=True)
    p = logits.detach().softmax(0)
    weights = {0.0: torch.ones_like(p)}.get(cap, (p / q).clamp(max=cap or 1))
    (plain,) = torch.autograd.grad(-(q * weights * logits.log_softmax(0)).sum(), logits)
    assert plain.norm() > 0.01 or cap == math.inf  # whole importance weights have no drift
    whole, _ = centered(logits, q, order, cap, are_whole=True)
    assert whole.norm() < 1e-12
    any_tail, _ = centered(logits, q, order[:4], cap, are_whole=False)
    in_proportion = q.clone()
    in_proportion[order[4:]] = p[order[4:]] / p[order[4:]].sum() * q[order[4:]].sum()
    tail, _ = centered(logits, in_proportion, order[:4], cap, are_whole=False)
    assert tail.norm() < 1e-12
    assert any_tail.norm() > 1e-4 or cap == math.inf


@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_score_centering_has_the_gradient_of_finite_differences_with_weights_held(cap: float) -> None:
    """-A (w d log p - sum_H c d log p_v), with w and c written out for one token whose head is 2 of 5 tokens."""
    logits = double([0.3, -0.2, 0.9, 0.1, -1.0]).requires_grad_()
    q = double([0.4, 0.3, 0.1, 0.15, 0.05])
    _, loss = centered(logits, q, torch.tensor([0, 1]), cap, are_whole=False)
    (gradient,) = torch.autograd.grad(loss(double([0, 0, 1.5, 0, 0])), logits)  # token 2 was sampled, A = 1.5
    p = logits.detach().softmax(0)
    rho = 0.3 / float(1 - p[0] - p[1])
    w = min(float(p[2]) / 0.1, cap) if cap else 1.0
    c = [
        (min(float(p[v]), cap * float(q[v])) - min(1.0, cap * rho) * float(p[v])) if cap
        else float(q[v]) - rho * float(p[v])
        for v in (0, 1)
    ]  # fmt: skip

    def held(z: Tensor) -> float:
        logp = z.log_softmax(0)
        return float(-1.5 * (w * logp[2] - c[0] * logp[0] - c[1] * logp[1]))

    step = 1e-6
    for i in range(5):
        moved = [held(logits.detach() + sign * step * torch.eye(5, dtype=torch.float64)[i]) for sign in (1, -1)]
        assert float(gradient[i]) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-6, abs=1e-9)


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


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2])
def test_k3_in_float32_is_accurate_for_small_divergences(size: float) -> None:
    difference = size * torch.randn(1000, generator=torch.Generator().manual_seed(0))
    got = kl_k3(torch.zeros(1000), difference)
    exact = torch.expm1(difference.double()) - difference.double()
    torch.testing.assert_close(got.double(), exact, rtol=1e-3, atol=1e-7 * size)
    assert float(got.double().mean()) == pytest.approx(float(exact.mean()), rel=1e-3)
    assert float(got.min()) >= 0


def test_tokens_that_the_dual_clip_holds_are_counted_by_themselves() -> None:
    """The ratios are e^1.5 = 4.48, e^1 = 2.72 and e^-0.5 = 0.61; with A = -1 the first alone has a loss above 3."""
    logprobs = double([1.5, 1.0, -0.5, 1.5]).requires_grad_()
    x = inputs(logprobs, double([0.0] * 4), double([-1.0, -1.0, -1.0, 1.0]), low=0.2, high=0.28)
    output = ppo_clip_loss(x)
    close(output.loss.detach(), [3.0, 2.718281828459045, 0.8, -1.28])
    (gradient,) = torch.autograd.grad(output.loss.sum(), logprobs)
    close(gradient, [0.0, 2.718281828459045, 0.0, 0.0])
    assert output.metrics["dual_clip_fraction"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert output.clipped.tolist() == [False, False, True, True]
    assert not ppo_clip_loss(dataclasses.replace(x, clip=ClipConfig(dual=0.0))).metrics


@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_sat_is_that_of_finite_differences_with_its_bounds_held(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    centre, noise, advantages = torch.randn(3, 20, generator=generator, dtype=torch.float64)
    logprobs = (centre + 0.3 * noise).requires_grad_()
    ratio = noise.mul(0.3).exp()
    size = (0.3 * noise).abs()
    limit = sorted(size.tolist())[15]  # the quantile 15 / 19 of 20 values
    c = torch.where(size > limit, limit**2 / (limit**2 + size**2), 1.0)
    low, high = 1 - 0.2 * torch.where(noise < 0, c, 1.0), 1 + 0.2 * torch.where(noise > 0, c, 1.0)
    loss = sat_loss(inputs(logprobs, centre, advantages, low=0.2, high=0.2), SatSettings(quantile=15 / 19)).loss
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    step = 1e-6
    moved = [
        torch.maximum(-r * advantages, -r.clamp(low, high) * advantages)
        for r in (ratio * math.exp(step), ratio * math.exp(-step))
    ]
    torch.testing.assert_close(gradient, (moved[0] - moved[1]) / (2 * step), atol=1e-6, rtol=1e-6)
    assert (gradient == 0).any() and (gradient != 0).any()


CHOSEN, REJECTED, HALF = torch.tensor([1.0, 0.5]), torch.tensor([0.2, 0.9]), torch.tensor([0.5, 0.5])
SCORES = [2.0, 1.0, 0.5, -1.0]
"""The scores of a ranking of four answers, the best first."""


def of_ranking(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """The loss of a ranking, and its gradient for each score."""
    scores = torch.tensor(SCORES, requires_grad=True)
    preferred, other = (scores[list(side)] for side in zip(*pairs, strict=True))
    zeros = torch.zeros(len(pairs))
    loss = bradley_terry(preferred, other, zeros, torch.full((len(pairs),), 1 / len(pairs)), 0.0)
    loss.backward()
    assert scores.grad is not None
    return loss, scores.grad


def test_pairs_with_margin_and_centering() -> None:
    """The numbers of comparisons were derived with the standard library alone."""
    zeros = torch.zeros(2)
    assert bradley_terry(CHOSEN, REJECTED, zeros, HALF, 0.0).item() == pytest.approx(0.6420580, abs=1e-6)
    assert bradley_terry(CHOSEN, REJECTED, HALF, HALF, 0.0).item() == pytest.approx(0.8977546, abs=1e-6)
    centred = bradley_terry(CHOSEN, REJECTED, zeros, HALF, 0.01).item()
    assert centred == pytest.approx(0.6420580 + 0.017, abs=1e-6)  # 0.01 * (1.2^2 + 1.4^2) / 2


def test_a_ranking_is_the_mean_of_its_pairs_and_a_tie_is_none() -> None:
    loss, gradient = of_ranking(list(itertools.combinations(range(4), 2)))
    assert loss.item() == pytest.approx(0.2276134, abs=1e-6)
    assert gradient.tolist() == pytest.approx([-0.0831321, -0.0379670, 0.0629234, 0.0581757], abs=1e-6)
    tied, _ = of_ranking([(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)])
    assert tied.item() == pytest.approx(0.1783207, abs=1e-6)


def test_accuracy_margin_and_calibration_of_comparisons() -> None:
    found = comparison_metrics(CHOSEN, REJECTED, torch.ones(2))
    assert found["accuracy"] == 0.5 and found["margin"] == pytest.approx(0.2)
    assert found["loss"] == pytest.approx(0.6420580, abs=1e-6)
    # sigmoid(.8) = .68997 is right, in bin 3; sigmoid(.4) = .59869 is wrong, in bin 1
    expected = ((1 - 1 / (1 + math.exp(-0.8))) + 1 / (1 + math.exp(-0.4))) / 2
    assert found["calibration_error"] == pytest.approx(expected, abs=1e-6)
    # four pairs of one confidence, of which three are right: .75 - sigmoid(1.0986) = .75 - .75
    d = math.log(3) * torch.tensor([1.0, 1.0, 1.0, -1.0])
    assert comparison_metrics(d, torch.zeros(4), torch.ones(4))["calibration_error"] == pytest.approx(0, abs=1e-6)


def test_weights_and_equal_rewards_of_comparisons() -> None:
    found = comparison_metrics(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]), torch.tensor([0.25, 0.75]))
    assert found["accuracy"] == pytest.approx(0.25 + 0.75 / 2)  # equal rewards count half
    assert found["margin"] == pytest.approx(0.25)
