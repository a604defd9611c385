"""GAE and V-trace compared with torchrl's, and losses with those of TRL's GRPOTrainer, on the same tensors."""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.base.config import (
    AlgorithmConfig,
    ClipConfig,
    CorrectionConfig,
    KlConfig,
    MasksConfig,
    RolloutConfig,
)
from learner.algorithms.advantages import gae, vtrace
from learner.algorithms.objective import Objective
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_micro, make_minibatch, make_response

pytestmark = pytest.mark.processes  # together they compute for long

os.environ.setdefault("HF_HUB_OFFLINE", "1")
WHY = "the peers to compare with are not installed: pip install -e '.[peers]'"
ROWS, LENGTH = 5, 12


def make_case(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(ROWS, LENGTH, generator=generator) for _ in range(3))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.97, 0.8), (1.0, 1.0)])
def test_gae_is_that_of_torchrl(gamma: float, lam: float) -> None:
    functional = pytest.importorskip("torchrl.objectives.value.functional", reason=WHY)
    rewards, values, _ = make_case(0)
    following = torch.cat([values[:, 1:], torch.full((ROWS, 1), 0.4)], 1)
    done = torch.zeros(ROWS, LENGTH, 1, dtype=torch.bool)
    expected = functional.generalized_advantage_estimate(
        gamma, lam, values[..., None], following[..., None], rewards[..., None], done, done
    )
    log_ratios = torch.zeros_like(values)
    got = gae(rewards, values, log_ratios, torch.ones_like(values).bool(), gamma, lam, bootstrap=0.4)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs[..., 0], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize(("gamma", "rho_cap", "c_cap"), [(1.0, 1.0, 1.0), (0.97, 2.0, 1.0)])
def test_vtrace_is_that_of_torchrl(gamma: float, rho_cap: float, c_cap: float) -> None:
    functional = pytest.importorskip("torchrl.objectives.value.functional", reason=WHY)
    rewards, values, log_ratios = make_case(1)
    following = torch.cat([values[:, 1:], torch.full((ROWS, 1), 0.4)], 1)
    done = torch.zeros(ROWS, LENGTH, 1, dtype=torch.bool)
    behaviour = -torch.ones_like(log_ratios)
    expected = functional.vtrace_advantage_estimate(
        gamma, (behaviour + log_ratios)[..., None], behaviour[..., None], values[..., None], following[..., None],
        rewards[..., None], done, done, rho_thresh=rho_cap, c_thresh=c_cap,
    )  # fmt: skip
    got = vtrace(rewards, values, log_ratios, torch.ones_like(values).bool(), gamma, 1.0, rho_cap, c_cap, bootstrap=0.4)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs[..., 0], atol=2e-5, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class Tensors:
    """A padded batch as TRL takes it; [B, T] each but the advantages, [B]."""

    logprobs: Tensor
    old: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor


def padded_batch(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, LENGTH, generator=generator)

    old = -3 * torch.rand(ROWS, LENGTH, generator=generator) - 0.1
    logprobs = old + normal(0.3)
    lengths = torch.tensor([12, 5, 9, 1, 7])
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    advantages = torch.randn(ROWS, generator=generator)
    return Tensors(logprobs.requires_grad_(), old, logprobs.detach() + normal(0.3), advantages, mask)


def trl_loss(batch: Tensors, loss_type: str, level: str, low: float, high: float, beta: float, opsm: float) -> Tensor:
    """The loss that GRPOTrainer computes when these log-probabilities replace its model."""
    trainer_module = pytest.importorskip("trl.trainer.grpo_trainer", reason=WHY)
    trainer_class = trainer_module.GRPOTrainer
    sums = SimpleNamespace(
        gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, num_processes=1
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (batch.logprobs, torch.ones_like(batch.old), None),
        top_entropy_quantile=1.0, aux_loss_enabled=False, off_policy_mask_threshold=opsm or None,
        importance_sampling_level=level, beta=beta, loss_type=loss_type, epsilon_low=low, epsilon_high=high,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        use_vllm=False, model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1,
        max_completion_length=LENGTH, accelerator=sums, _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        get_off_policy_mask=trainer_class.get_off_policy_mask,
    )  # fmt: skip
    ids = torch.zeros(ROWS, 1).long()
    inputs = {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": batch.mask, "completion_mask": batch.mask,
        "advantages": batch.advantages, "old_per_token_logps": batch.old, "ref_per_token_logps": batch.reference,
        "sampling_per_token_logps": batch.old, "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip
    loss: Tensor = trainer_class._compute_loss(trainer, None, inputs)
    return loss


def our_loss(batch: Tensors, algorithm: AlgorithmConfig, tmp_path: Path) -> Tensor:
    rollout = RolloutConfig(group_size=4, max_response_tokens=LENGTH)
    config = learner_config(tmp_path / "none", algorithm=algorithm, rollout=rollout)
    flat: dict[str, Any] = {name: getattr(batch, name).flatten() for name in ("old", "reference", "logprobs")}
    trained = batch.mask.bool().flatten()
    response = make_response(
        (LENGTH,) * ROWS, behaviour=flat["old"], trained=trained,
        advantages=batch.advantages.repeat_interleave(LENGTH),
    )  # fmt: skip
    micro = make_micro(response, reference=flat["reference"])
    zeros = torch.zeros(len(trained))
    minibatch = make_minibatch(micro)
    total = Objective(config).losses(minibatch, micro, flat["logprobs"], zeros, None).policy
    count = {"token_mean": int(trained.sum()), "sequence_mean": ROWS, "constant": ROWS * LENGTH}
    return total / count[algorithm.aggregation]


COUPLED: dict[str, Any] = {"old_logprobs": "rollout"}
CLIP = {"low": 0.2, "high": 0.28, "dual": 0.0}
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("grpo", {}, {"aggregation": "sequence_mean"}),
    ("bnpo", {}, {"aggregation": "token_mean"}),
    ("dapo", {"beta": 0.04}, {"aggregation": "token_mean", "kl": KlConfig(kind="k3_loss", coef=0.04)}),
    ("dr_grpo", {}, {"aggregation": "constant"}),
    ("cispo", {"high": 3.0}, {"loss": "cispo", "clip": ClipConfig(low=1.0, high=2.0)}),
    ("grpo", {"level": "sequence"}, {"loss": "gspo", "aggregation": "sequence_mean"}),
    ("bnpo", {"opsm": 0.05}, {"correction": CorrectionConfig(masks=MasksConfig(opsm=0.05))}),
]


@pytest.mark.parametrize(("loss_type", "theirs", "ours"), CASES)
def test_the_loss_and_gradient_are_those_of_trl(
    loss_type: str, theirs: dict[str, Any], ours: dict[str, Any], tmp_path: Path
) -> None:
    for seed in range(3):
        batch = padded_batch(seed)
        arguments = {"level": "token", "low": 0.2, "high": 0.28, "beta": 0.0, "opsm": 0.0, **theirs}
        algorithm = AlgorithmConfig(**{"clip": ClipConfig(**CLIP), **COUPLED, **ours})
        losses = trl_loss(batch, loss_type, **arguments), our_loss(batch, algorithm, tmp_path)
        torch.testing.assert_close(losses[1], losses[0], atol=1e-6, rtol=1e-5)
        gradients = [torch.autograd.grad(loss, batch.logprobs)[0] for loss in losses]
        torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)
        assert gradients[0].any()
