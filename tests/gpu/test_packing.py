"""Logprobs and gradient of packed rows compared with every row alone, for each kind of attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.utils import is_flash_attn_2_available

from async_rl.base.config import Config
from learner.loop.updater import Updater
from tests.kit.configs import changed
from tests.kit.learner.random_batches import random_batch
from tests.kit.learner.served_batches import FLOAT32_OPEN, Note, learner_logprobs
from tests.kit.learner.updates import gradients

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def opened(config: Config, attention: str, max_tokens: int, device: torch.device) -> Updater:
    return Updater(changed(
        config, model={"attn_implementation": attention}, learner={"max_tokens_per_microbatch": max_tokens}
    ), device)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention", "flash_attention_2"])
def test_packing_changes_neither_logprobs_nor_gradient(
    config: Config, device: torch.device, one_rank: None, note: Note, attention: str, dtype: str
) -> None:
    if device.type == "cpu" and (attention != "sdpa" or dtype != "float32"):
        pytest.skip("for GPUs")
    if attention == "flash_attention_2" and (not is_flash_attn_2_available() or dtype == "float32"):
        pytest.skip("flash-attn 2 is not installed, or can't compute this type")
    config = changed(config, model={"dtype": dtype})
    batch, longest = random_batch(config), config.longest_tokens
    packed = opened(config, attention, 8 * longest, device)
    alone = opened(config, "sdpa", longest, device)
    truth = opened(changed(config, model={"dtype": "float32"}), "sdpa", longest, device)
    exact, expected = learner_logprobs(truth, batch), gradients(truth, batch)
    differences = learner_logprobs(packed, batch) - exact
    note(f"packed {attention} against float32 sdpa alone", differences, dtype=dtype)
    (mean, p99), turned = FLOAT32_OPEN, dict.fromkeys(expected, 1e-4)
    if dtype == "bfloat16":  # what it costs rows that are alone, and a fifth more
        cost = np.abs(learner_logprobs(alone, batch) - exact)
        mean, p99 = 1.2 * float(cost.mean()), 1.2 * float(np.quantile(cost, 0.99))
        turned = {name: 1.2 * angle for name, angle in turns(gradients(alone, batch), expected).items()}
    assert np.abs(differences).mean() < mean and np.quantile(np.abs(differences), 0.99) < p99
    found = turns(gradients(packed, batch), expected)
    assert not {name: (angle, turned[name]) for name, angle in found.items() if angle > turned[name]}


def turns(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """One minus the cosine of the angle between each gradient and the expected one."""
    return {
        name: 1 - torch.cosine_similarity(gradient.double().flatten(), expected[name].double().flatten(), 0).item()
        for name, gradient in gradients.items()
    }
