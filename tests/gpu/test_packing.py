"""Logprobs and gradient of packed rows compared with every row alone, for each kind of attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.utils import is_flash_attn_2_available

from async_rl.config import Config
from async_rl.types import Batch
from learner.algorithms.diagnostics import MetricAccumulator
from learner.algorithms.token_advantages import batch_advantages
from learner.updater import Updater
from rollout_server.engines.base import SampledReply
from tests.kit.configs import changed
from tests.kit.engines.replies import request_for
from tests.kit.learner.served_batches import OPEN, Note, learner_logprobs, served_batch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def random_batch(config: Config) -> Batch:
    """A batch of rows with random lengths and random tokens, as if a uniform policy had sampled them."""
    rng = np.random.default_rng(0)
    requests = [request_for(index) for index in range(8)]
    rows = []
    for _ in requests:
        lengths = rng.integers(1, config.rollout.max_response_tokens + 1, size=config.rollout.group_size)
        rows.append([
            SampledReply(
                tokens=rng.integers(4, 90, size=length).astype(np.int32),
                logprobs=np.full(length, -4.5, np.float32), versions=np.zeros(length, np.int32), finish_reason="stop",
            )
            for length in lengths.tolist()
        ])
    return served_batch(requests, rows)


def opened(config: Config, attention: str, max_tokens: int, device: torch.device) -> Updater:
    return Updater(changed(
        config, model={"attn_implementation": attention}, learner={"max_tokens_per_microbatch": max_tokens}
    ), device)


def gradients(updater: Updater, batch: Batch) -> dict[str, Tensor]:
    packed = updater.pack(batch, batch_advantages(updater.config, batch))
    (minibatch,) = updater.objective.prepare(updater.at_step_start(packed))
    updater.forward_backward(minibatch, MetricAccumulator(), trains_policy=True, is_first_epoch=True)
    return {name: p.grad.full_tensor() for name, p in updater.policy.lm.named_parameters()}  # type: ignore[union-attr]


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
