"""The step of the policy by the effective sample size of its batch, by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.base.errors import ConfigError
from learner.algorithms.losses import step_scale, weight_sums
from learner.loop.updater import Updater
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch, make_response
from tests.kit.learner.updates import batch_logprobs, values_of

pytestmark = pytest.mark.processes  # together they compute for long

LR = 3e-3


def test_the_scale_is_the_root_of_the_effective_share_of_the_samples() -> None:
    """Weights 1, 1 and 2: ESS = 16 / 6 of 3, so sqrt(8 / 9). Equal weights leave the step as it is."""
    assert step_scale(4.0, 6.0, 3.0) == pytest.approx(math.sqrt(8 / 9))
    assert step_scale(6.0, 12.0, 3.0) == 1.0
    assert step_scale(0.0, 0.0, 0.0) == 1.0


@pytest.mark.parametrize("sums", [(math.nan, math.nan), (math.inf, math.inf), (2.0, math.inf), (2.0, math.nan)])
def test_weights_that_are_no_numbers_leave_the_step_as_it_is(sums: tuple[float, float]) -> None:
    assert step_scale(*sums, 3.0) == 1.0


def test_weights_are_those_of_trained_tokens_or_of_the_rows_that_have_any() -> None:
    """Rows of tokens with weights (2, 3, untrained), (untrained) and (1/2)."""
    log_rho = torch.tensor([2.0, 3.0, 1.0, 1.0, 0.5]).log()
    trained = torch.tensor([True, True, False, False, True])
    response = make_response((3, 1, 1), trained=trained)
    own = torch.where(trained, log_rho, 0.0)
    assert weight_sums(own, response, False).tolist() == pytest.approx([5.5, 13.25, 3.0])
    assert weight_sums(own, response, True).tolist() == pytest.approx([6.5, 36.25, 2.0])


@pytest.mark.parametrize("algorithm", [{}, {"num_minibatches": 3, "epochs": 2}, {"old_logprobs": "rollout"}])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_learning_rate_is_scaled_by_what_the_reference_model_says(
    tiny_model_path: Path, one_rank: None, level: str, algorithm: dict[str, Any]
) -> None:
    batch = make_batch()
    lm = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    log_rho = []
    for (g, i), ours in batch_logprobs(lm, batch).items():
        row = batch.groups[g].rows[i]
        log_rho.append((ours.double().numpy() - row.logprobs)[row.mask])
    weights = np.exp(np.concatenate(log_rho) if level == "token" else [row.sum() for row in log_rho if len(row)])
    scale = weights.sum() / math.sqrt(len(weights) * (weights**2).sum())
    found = {}
    for by in ("off", level):
        sizes = {"lr": LR, "max_tokens_per_microbatch": 40}
        config = learner_config(tiny_model_path, algorithm=algorithm, learner={**sizes, "lr_by_ess": by})
        found[by] = values_of(Updater(config, torch.device("cpu")).update(batch))
    assert scale < 0.99
    assert found[level]["policy/lr_scale"] == pytest.approx(scale, rel=1e-4)
    assert found[level]["policy/lr"] == pytest.approx(LR * scale, rel=1e-4)
    assert "policy/lr_scale" not in found["off"] and found["off"]["policy/lr"] == LR
    name = "offpolicy/ess" + ("_sequence" if level == "sequence" else "")
    assert found[level]["policy/lr_scale"] == pytest.approx(math.sqrt(found["off"][name]), rel=1e-4)


def test_interpolated_logprobs_that_show_no_sample_size_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^learner\.lr_by_ess"):
        learner_config(algorithm={"epochs": 2, "old_logprobs": "interpolate"}, learner={"lr_by_ess": "token"})
