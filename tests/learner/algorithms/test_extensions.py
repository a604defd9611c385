"""Losses, advantages, corrections and aggregations are found by name, and may come from outside the packages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.base.config.loading import load_config
from async_rl.base.errors import AsyncRLError
from async_rl.base.seams import Loss
from learner.algorithms.losses import LossInputs, LossOutput
from learner.loop.updater import Updater
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.learner.updates import batch_logprobs, values_of

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.yaml"
OUTSIDE = [
    "algorithm.advantage=tests.extensions.advantage:WIN_RATE",
    "algorithm.loss=tests.extensions.loss:POLICY_GRADIENT",
    "algorithm.correction={kind: 'tests.extensions.correction:ROOT', cap: 1.5}",
]


@pytest.mark.parametrize("bound", [0.1, 0.4, 1.0])
def test_a_step_trains_with_an_advantage_a_loss_and_a_correction_from_outside(
    tiny_model_path: Path, one_rank: None, bound: float
) -> None:
    batch = make_batch()
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    total, tokens, bounded = 0.0, 0, 0
    for (g, i), logprobs in batch_logprobs(lm, batch).items():
        rewards, row = [row.reward for row in batch.groups[g].rows], batch.groups[g].rows[i]
        wins = sum((row.reward > x) - (row.reward < x) for x in rewards) / len(rewards)
        weights = (0.5 * (logprobs - torch.tensor(row.logprobs))).exp().clamp(0.0, 1.5)
        advantage = min(max(wins, -bound), bound)
        total -= float((weights * advantage * logprobs)[torch.tensor(row.mask)].sum())
        tokens += int(row.mask.sum())
        bounded += int(row.mask.sum()) * (abs(wins) > bound)
    algorithm = load_config(QUICKSTART, [*OUTSIDE, f"algorithm.params.bound={bound}"]).algorithm
    updater = Updater(learner_config(tiny_model_path, algorithm=algorithm), torch.device("cpu"))
    metrics = values_of(updater.update(batch))
    assert metrics["policy/loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert metrics["loss/bounded_fraction"] == pytest.approx(bounded / tokens, rel=1e-12)
    assert metrics["policy/grad_norm"] > 0


def mean_loss(x: LossInputs) -> LossOutput:
    """A mistake that authors make: the loss is averaged already."""
    return LossOutput((-x.advantages * x.logprobs).mean(), torch.zeros_like(x.trained))


def scalar_metric(x: LossInputs) -> LossOutput:
    """Another mistake: the metric is a number."""
    return LossOutput(-x.advantages * x.logprobs, torch.zeros_like(x.trained), {"ratio": 0.5})


MEAN_LOSS, SCALAR_METRIC = Loss(function=mean_loss), Loss(function=scalar_metric)


@pytest.mark.parametrize(
    ("loss", "said"), [("MEAN_LOSS", r"loss .*got shape \(\)"), ("SCALAR_METRIC", r"metrics\['ratio'\] .*got 0\.5")]
)
def test_a_loss_that_returns_no_value_for_each_token_is_refused_in_its_first_step(
    loss: str, said: str, tiny_model_path: Path, one_rank: None
) -> None:
    algorithm = load_config(QUICKSTART, [f"algorithm.loss={__name__}:{loss}"]).algorithm
    updater = Updater(learner_config(tiny_model_path, algorithm=algorithm), torch.device("cpu"))
    with pytest.raises(AsyncRLError, match=said):
        updater.update(make_batch())
