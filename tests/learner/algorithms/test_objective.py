"""The loss of a micro-batch as a whole, by every rule there is, on small tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from async_rl.base.config import (
    AlgorithmConfig,
    ClipConfig,
    CorrectionConfig,
    KlConfig,
    MasksConfig,
)
from learner.algorithms.advantages import critic_advantages, gae, vtrace
from learner.algorithms.advantages import whiten as whiten_values
from learner.algorithms.losses import log_ratios
from learner.algorithms.objective import AGGREGATIONS, Objective
from learner.packing import MicroBatch
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch, make_micro, make_minibatch, make_response

LENGTHS = (5, 3, 4, 1)
ALL_MASKS = MasksConfig(
    token=(0.2, 4.0), sequence=(0.05, 20.0), geometric=(0.5, 2.0), kpop=0.05, m2po=0.2, opsm=0.3, veto=0.15
)
RULES: dict[str, AlgorithmConfig] = {
    **{
        kind: AlgorithmConfig(correction=CorrectionConfig(kind=kind, floor=0.5, cap=2.0))
        for kind in ("none", "token_tis", "sequence_tis", "geometric_tis", "topr")
    },
    **{
        name: AlgorithmConfig(correction=CorrectionConfig(masks=MasksConfig(**{name: getattr(ALL_MASKS, name)})))
        for name in ("token", "sequence", "geometric", "kpop", "m2po", "opsm", "veto")
    },
    "all_masks": AlgorithmConfig(correction=CorrectionConfig(masks=ALL_MASKS)),
    "coupled": AlgorithmConfig(old_logprobs="rollout"),
    "gspo": AlgorithmConfig(loss="gspo", aggregation="sequence_mean"),
    "dppo_tv": AlgorithmConfig(loss="dppo_tv", old_logprobs="rollout"),
    "dppo_kl": AlgorithmConfig(loss="dppo_kl", old_logprobs="rollout"),
    "constant": AlgorithmConfig(aggregation="constant"),
    "k1_reward": AlgorithmConfig(kl=KlConfig(kind="k1_reward", coef=0.1)),
    "batch_normalised": AlgorithmConfig(correction=CorrectionConfig(kind="token_tis", cap=1.5, batch_normalised=True)),
    "k2_loss": AlgorithmConfig(kl=KlConfig(kind="k2_loss", coef=0.1)),
    "k3_loss": AlgorithmConfig(kl=KlConfig(kind="k3_loss", coef=0.1)),
    "gae": AlgorithmConfig(advantage="gae", kl=KlConfig(kind="k1_reward", coef=0.1)),
    "vtrace": AlgorithmConfig(advantage="vtrace"),
    "whitened_vtrace": AlgorithmConfig(advantage="vtrace", whiten=True),
}
NOT_THE_GRADIENT_OF_THEIR_VALUE = {
    "cispo": AlgorithmConfig(loss="cispo", old_logprobs="rollout", clip=ClipConfig(low=1.0, high=4.0)),
    "sat": AlgorithmConfig(loss="sat", old_logprobs="rollout"),
    "interpolate": AlgorithmConfig(old_logprobs="interpolate", epochs=2),
}


def objective_of(algorithm: AlgorithmConfig) -> Objective:
    return Objective(learner_config(algorithm=algorithm, staleness={"max": 4}))


def make_case(seed: int, masked: float = 0.3) -> tuple[MicroBatch, Tensor, Tensor]:
    """A micro-batch, learner logprobs and entropies, in float64."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)

    def normal(scale: float = 1.0) -> Tensor:
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    behaviour = -2 * torch.rand(n, generator=generator, dtype=torch.float64) - 0.5
    proximal = behaviour + normal(0.5)
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    response = make_response(
        LENGTHS, behaviour=behaviour, trained=torch.rand(n, generator=generator) >= masked,
        staleness=torch.randint(0, 4, (n,), generator=generator), rewards=torch.rand(n, generator=generator),
        advantages=advantages.repeat_interleave(torch.tensor(LENGTHS)),
    )  # fmt: skip
    micro = make_micro(response, proximal=proximal, values=normal(), reference=proximal + normal(0.3))
    return micro, (proximal + normal(0.3)).requires_grad_(), (normal() + 3).requires_grad_()


def with_response(micro: MicroBatch, **changes: Any) -> MicroBatch:
    return dataclasses.replace(micro, response=dataclasses.replace(micro.response, **changes))


def policy_loss(objective: Objective, micro: MicroBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
    values = None
    if objective.config.algorithm.advantage in ("gae", "vtrace"):
        values = torch.zeros(len(logprobs), dtype=torch.float64, requires_grad=True)
    (minibatch,) = objective.prepare([make_minibatch(micro)])
    return objective.losses(minibatch, micro, logprobs, entropy, values).policy


@pytest.mark.parametrize("name", RULES)
def test_gradients_are_those_of_finite_differences(name: str, one_rank: None) -> None:
    objective = objective_of(RULES[name])
    for seed in range(3):
        micro, logprobs, entropy = make_case(seed)
        assert torch.autograd.gradcheck(
            lambda lp, m=micro, h=entropy: policy_loss(objective, m, lp, h), logprobs, eps=1e-7, atol=1e-5
        )


@pytest.mark.parametrize("name", [*RULES, *NOT_THE_GRADIENT_OF_THEIR_VALUE])
def test_untrained_tokens_have_no_gradient_and_no_influence(name: str, one_rank: None) -> None:
    algorithm = {**RULES, **NOT_THE_GRADIENT_OF_THEIR_VALUE}[name]
    objective = objective_of(algorithm)
    micro, logprobs, entropy = make_case(7)
    trained = micro.response.trained
    loss = policy_loss(objective, micro, logprobs, entropy)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert torch.equal(gradient[~trained], torch.zeros_like(gradient[~trained]))
    assert gradient.any()
    assert micro.values is not None
    micro.response.behaviour[~trained] += 1.7
    micro.values[~trained] += 1.7
    moved = logprobs.detach().clone()
    for tensor in (micro.proximal, micro.reference, moved):
        assert tensor is not None
        tensor[~trained] = -torch.inf
    again = policy_loss(objective, micro, moved.requires_grad_(), entropy)
    assert again.item() == pytest.approx(loss.item(), rel=1e-9)
    torch.testing.assert_close(torch.autograd.grad(again, moved)[0], gradient)


def test_masked_tokens_have_exactly_no_gradient_from_loss_kl_or_entropy(one_rank: None) -> None:
    bounds = (0.7, 1.4)
    algorithm = AlgorithmConfig(
        correction=CorrectionConfig(masks=MasksConfig(token=bounds)), kl=KlConfig(kind="k2_loss"), entropy_coef=0.1
    )
    objective = objective_of(algorithm)
    micro, logprobs, entropy = make_case(3, masked=0.0)
    assert micro.proximal is not None
    rho = (micro.proximal - micro.response.behaviour).exp()
    inside = (rho >= bounds[0]) & (rho <= bounds[1])
    assert inside.any() and not inside.all()
    gradients = torch.autograd.grad(policy_loss(objective, micro, logprobs, entropy), [logprobs, entropy])
    assert torch.equal(gradients[1], -0.1 * inside.double())
    assert not gradients[0][~inside].any()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_tokens_that_a_mask_drops_do_not_amplify_the_others(aggregation: Any, one_rank: None) -> None:
    gradients = []
    micro, logprobs, entropy = make_case(3)
    for masks in (MasksConfig(), MasksConfig(token=(0.7, 1.4))):
        algorithm = AlgorithmConfig(aggregation=aggregation, correction=CorrectionConfig(masks=masks))
        objective = objective_of(algorithm)
        (gradient,) = torch.autograd.grad(policy_loss(objective, micro, logprobs, entropy), logprobs)
        gradients.append(gradient)
    whole, masked = gradients
    kept = masked != 0
    assert 0 < kept.sum() < (whole != 0).sum()
    assert torch.equal(masked[kept], whole[kept])


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("advantage", ["gae", "vtrace"])
def test_a_critics_advantages_are_whitened_over_the_batch_on_request(
    advantage: Any, whiten: bool, one_rank: None
) -> None:
    """With ratios of 1 in the loss the gradient of a token is minus its advantage."""
    algorithm = AlgorithmConfig(advantage=advantage, whiten=whiten, correction=CorrectionConfig(kind="none"))
    objective = objective_of(algorithm)
    assert objective.computes_values == objective.computes_proximal == whiten
    micro_batches = [make_case(seed)[0] for seed in (1, 2, 3)]
    split = objective.prepare([make_minibatch(*micro_batches[:2]), make_minibatch(micro_batches[2])])
    got, plain, trained = [], [], torch.cat([micro.response.trained for micro in micro_batches])
    for minibatch in split:
        for micro in minibatch.micro_batches:
            assert micro.proximal is not None and micro.values is not None
            logprobs = micro.proximal.clone().requires_grad_()
            loss = objective.losses(minibatch, micro, logprobs, torch.zeros_like(logprobs), micro.values).policy
            got.append(-torch.autograd.grad(loss, logprobs)[0])
            log_rho = log_ratios(micro.proximal, micro.response.behaviour, micro.response.trained)
            no_penalty = torch.zeros_like(log_rho)
            estimator = gae if advantage == "gae" else vtrace
            found, _ = critic_advantages(
                objective.config, estimator, micro.response, micro.values, log_rho, no_penalty
            )
            plain.append(found)
    whole = torch.cat(plain) * trained
    torch.testing.assert_close(torch.cat(got), whiten_values(whole, trained) if whiten else whole)


def test_the_two_sided_clip_holds_weights_between_floor_and_cap(one_rank: None) -> None:
    algorithm = AlgorithmConfig(correction=CorrectionConfig(floor=0.5, cap=2.0), clip=ClipConfig(dual=0.0))
    objective = objective_of(algorithm)
    micro, _, entropy = make_case(5, masked=0.0)
    assert micro.proximal is not None
    logprobs = micro.proximal.clone().requires_grad_()  # ratio 1: the gradient is -weight * advantage
    log_rho = torch.linspace(-2, 2, len(logprobs), dtype=torch.float64)
    micro = with_response(micro, behaviour=micro.proximal - log_rho)
    losses = objective.losses(make_minibatch(micro), micro, logprobs, entropy, None)
    (gradient,) = torch.autograd.grad(losses.policy, logprobs)
    weights = log_rho.exp().clamp(0.5, 2.0)
    assert torch.equal(losses.truncated, weights != log_rho.exp()) and losses.truncated[[0, -1]].all()
    torch.testing.assert_close(gradient, -weights * micro.response.advantages, atol=1e-6, rtol=1e-5)
    assert float(weights.min()) == 0.5 and float(weights.max()) == 2.0


def test_batch_normalised_weights_are_those_of_the_reference_vectors(vectors: dict[str, Any], one_rank: None) -> None:
    """With advantages of -1 on fresh ratios the gradient of a token is its weight."""
    for vector in vectors["is_weights"]:
        mask = torch.tensor(vector["mask"]).bool()
        lengths = tuple(len(row) for row in mask)
        correction = CorrectionConfig(kind="token_tis", cap=vector["cap"], batch_normalised=True)
        objective = objective_of(AlgorithmConfig(correction=correction))
        log_rho = torch.tensor(vector["log_ratio"], dtype=torch.float64).flatten()
        zeros = torch.zeros(len(log_rho), dtype=torch.float64)
        response = make_response(
            lengths, behaviour=zeros - 1 - log_rho, trained=mask.flatten(), advantages=zeros - 1
        )
        micro = make_micro(response, proximal=zeros - 1)
        logprobs = (zeros - 1).requires_grad_()
        (gradient,) = torch.autograd.grad(policy_loss(objective, micro, logprobs, zeros), logprobs)
        expected = torch.tensor(vector["batchnorm_tis_mean1"]).double() * mask
        torch.testing.assert_close(gradient.reshape(mask.shape), expected, atol=1e-6, rtol=1e-6)


def test_reinforce_pp_whitens_what_the_penalty_left_of_the_returns(one_rank: None) -> None:
    """Rows of 1 and 2 tokens, rewards 1 and 0, penalties 0.5; 0.25 and 0.25: returns to go 0.5; -0.5, -0.25."""
    algorithm = AlgorithmConfig(advantage="reinforce_pp", kl=KlConfig(kind="k1_reward", coef=0.5))
    objective = objective_of(algorithm)
    returns = np.array([0.5, -0.5, -0.25])
    logprobs = torch.tensor([-1.0, -1.0, -1.0]).double().requires_grad_()  # ratios of 1: the gradient is -advantage
    micro = make_micro(
        make_response((1, 2), advantages=torch.tensor([1.0, 0.0, 0.0]).double(), behaviour=logprobs.detach()),
        proximal=logprobs.detach(), reference=torch.tensor([-2.0, -1.5, -1.5]).double(),
    )
    expected = (returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8)
    (gradient,) = torch.autograd.grad(policy_loss(objective, micro, logprobs, logprobs), logprobs)
    assert (-gradient).tolist() == pytest.approx(expected.tolist())


def test_an_adaptive_coefficient_moves_toward_its_target_and_a_fixed_one_stays() -> None:
    totals = {"tokens": np.array([4.0, 6.0]), "reference_k3": np.float64(1.0)}  # 0.1 nats a token
    for target, factor in ((0.0, 1.0), (0.05, 1.02), (0.1, 1.0), (0.11, 1 + 0.1 * (0.1 / 0.11 - 1)), (1.0, 0.98)):
        kl = KlConfig(kind="k2_loss", coef=0.5, target=target)
        objective = objective_of(AlgorithmConfig(kl=kl))
        objective.finish(totals, make_batch(), has_trained_policy=False)  # type: ignore[arg-type]
        assert objective.kl_coef == 0.5  # as in the critic's warm-up
        metrics = {m.key: m.value for m in objective.finish(totals, make_batch(), has_trained_policy=True)}  # type: ignore[arg-type]
        assert metrics == {"kl/reference": 0.1, "kl/coef": 0.5}
        assert objective.kl_coef == pytest.approx(0.5 * factor)


def test_a_rollback_of_the_watcher_raises_the_coefficient_and_lowers_its_target() -> None:
    totals = {"tokens": np.array([4.0, 6.0]), "reference_k3": np.float64(1.0)}  # 0.1 nats a token
    for target, resumed, moved in ((0.0, 1.0, 1.0), (0.2, 0.7, 0.7), (0.4, 0.7, 0.7 * 0.98)):
        algorithm = AlgorithmConfig(kl=KlConfig(kind="k2_loss", coef=0.5, target=target))
        objective = Objective(learner_config(algorithm=algorithm, watch={"rollbacks": 1}))
        assert objective.kl_coef == 1.0
        objective.restore(0.7)
        assert objective.kl_coef == resumed, "a fixed one is that of the configuration"
        objective.finish(totals, make_batch(), has_trained_policy=True)  # type: ignore[arg-type]
        assert objective.kl_coef == pytest.approx(moved)
