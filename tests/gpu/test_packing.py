"""Logprobs and gradient of packed rows compared with every row alone, for each kind of attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.utils import is_flash_attn_2_available

from async_rl.config import Config
from learner.updater import Updater
from tests.kit.configs import changed
from tests.kit.learner.random_batches import gradients, random_batch
from tests.kit.learner.served_batches import OPEN, Note, learner_logprobs

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
    batch = random_batch(config)
    longest = config.longest_tokens
    packed = opened(config, attention, 8 * longest, device)
    alone = opened(changed(config, model={"dtype": "float32"}), "sdpa", longest, device)
    truth = learner_logprobs(alone, batch)
    differences = learner_logprobs(packed, batch) - truth
    note(f"packed {attention} against float32 sdpa alone", differences, dtype=dtype)
    mean, p99 = OPEN[dtype]
    assert np.abs(differences).mean() < mean and np.quantile(np.abs(differences), 0.99) < p99
    found, expected = gradients(packed, batch), gradients(alone, batch)
    cosines = {n: torch.cosine_similarity(g.flatten(), expected[n].flatten(), 0).item() for n, g in found.items()}
    assert min(cosines.values()) > (0.9999 if dtype == "float32" else 0.98), cosines
