"""Losses and KL estimators against reference vectors, numbers worked out by hand, and finite differences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from learner.algorithms.masked_ops import binary_kl

LOGPROB = st.floats(-30, 0, width=32)


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


def test_dppo_kl_drops_only_tokens_that_move_further_away() -> None:
    """From 0.25 to 0.75 the binary KL is 0.549; the advantage's sign says whether that is away or back."""
    low, high = double([0.25]).log(), double([0.75]).log()
    for centre, logprobs, advantage, drops in (
        (low, high, 1.0, True), (low, high, -1.0, False), (high, low, -1.0, True), (high, low, 1.0, False),
        (low, high, 0.0, False),
    ):  # fmt: skip
        x = inputs(logprobs, centre, double([advantage]))
        assert dppo_kl_loss(x, DppoKlSettings()).clipped.tolist() == [drops]
        assert not dppo_kl_loss(x, DppoKlSettings(kl=0.55)).clipped.any()


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


@given(st.lists(st.tuples(LOGPROB, LOGPROB, st.sampled_from([-1.0, 1.0])), min_size=1, max_size=20))
def test_sat_never_lets_a_token_move_further_than_ppo(tokens: list[tuple[float, float, float]]) -> None:
    logprobs, centre, advantages = double(tokens).T
    x = inputs(logprobs, centre, advantages, low=0.2, high=0.2, dual=0.0)
    ppo, sat = ppo_clip_loss(x), sat_loss(x, SatSettings())
    assert (sat.loss >= ppo.loss - 1e-12).all()
    assert (sat.clipped | ~ppo.clipped).all()


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


def test_the_mean_of_k1_and_of_k3_over_a_distribution_is_its_divergence() -> None:
    p, q = double([0.7, 0.2, 0.1]), double([0.3, 0.3, 0.4])
    exact = float((p * (p / q).log()).sum())
    for estimator in (kl_k1, kl_k3):
        assert abs(float((p * estimator(p.log(), q.log())).sum()) - exact) < 1e-12


@given(LOGPROB, LOGPROB, st.floats(-3, 3, width=32))
def test_a_token_has_no_gradient_where_it_is_clipped_and_a_ratio_of_one_never_is(
    logprob: float, proximal: float, advantage: float
) -> None:
    learner = double([logprob]).requires_grad_()
    output = ppo_clip_loss(inputs(learner, double([proximal]), double([advantage]), low=0.2, high=0.28, dual=0.0))
    output.loss.sum().backward()
    if output.clipped.item():
        assert learner.grad is not None and learner.grad.item() == 0
        assert logprob != proximal
    ratio = min(max(logprob - proximal, -20.0), 20.0)
    moved_far = (advantage > 0 and ratio > 0.247) or (advantage < 0 and ratio < -0.2232)
    assert bool(output.clipped.item()) == moved_far


@given(LOGPROB, LOGPROB, st.floats(-3, -0.125, width=32))
def test_dual_clip_bounds_the_loss_of_a_bad_token(logprob: float, proximal: float, advantage: float) -> None:
    x = inputs(double([logprob]), double([proximal]), double([advantage]), low=0.2, high=0.28)
    assert ppo_clip_loss(x).loss.item() <= 3.0 * abs(advantage) + 1e-12


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


ANSWERS = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
TRAINED = torch.tensor([True, True, False, True, True, True, True, False])
OWN_ANSWERS: dict[str, Any] = {"trained": TRAINED, "rows": ANSWERS, "count": 3, "low": 0.2, "high": 0.28}
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "ppo_clip": lambda lp, centre, adv: ppo_clip_loss(inputs(lp, centre, adv, **OWN_ANSWERS, dual=0.0)).loss,
    "ppo_dual_clip": lambda lp, centre, adv: ppo_clip_loss(inputs(lp, centre, adv, **OWN_ANSWERS)).loss,
    "gspo": lambda lp, centre, adv: gspo_loss(inputs(lp, centre, adv, **OWN_ANSWERS)).loss,
    "dppo_tv": lambda lp, centre, adv: dppo_tv_loss(inputs(lp, centre, adv, **OWN_ANSWERS), DppoTvSettings()).loss,
    "dppo_kl": lambda lp, centre, adv: dppo_kl_loss(inputs(lp, centre, adv, **OWN_ANSWERS), DppoKlSettings()).loss,
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


@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_cispo_is_that_of_finite_differences_with_its_weight_held(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, centre, advantages = torch.randn(3, 8, generator=generator, dtype=torch.float64).sub(3)
    weight = (logprobs - centre).exp().clamp(0, 5)
    output = cispo_loss(inputs(logprobs.requires_grad_(), centre, advantages, low=1.0, high=4.0))
    (gradient,) = torch.autograd.grad(output.loss.sum(), logprobs)
    step = 1e-6
    for i in range(8):
        moved = [(logprobs.detach()[i] + sign * step) * -weight[i] * advantages[i] for sign in (1, -1)]
        assert float(gradient[i]) == pytest.approx(float((moved[0] - moved[1]).detach() / (2 * step)), rel=1e-6)
