"""Verification of a push against a real server, with equal and with different weights."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.config import Config, ModelConfig
from async_rl.errors import WeightSyncError
from async_rl.weights import open_publisher
from learner.pusher import VERIFY_TOKENS, VERIFY_TOLERANCE
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import server_config
from tests.kit.engines.replies import with_engine

TOKENS = np.random.default_rng(0).integers(4, 100, size=VERIFY_TOKENS).tolist()


def logprobs_of(model: PreTrainedModel) -> list[float]:
    """Compute logprobs as the learner does: logits in the compute type, their softmax in float32."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()


def verify(config: Config, learner_logprobs: list[float], dtype: torch.dtype) -> None:
    async def use(engine: HFEngine) -> None:
        publisher = open_publisher(config, [engine.url], 0, torch.device("cpu"))
        await asyncio.to_thread(publisher.verify, TOKENS, learner_logprobs, VERIFY_TOLERANCE[dtype])
        publisher.close()

    with_engine(config, use)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_pass_and_one_changed_matrix_does_not(dtype: torch.dtype, model_folder: Path) -> None:
    name = str(dtype).removeprefix("torch.")
    config = dataclasses.replace(
        server_config("hf", model_folder), model=ModelConfig(path=str(model_folder), dtype=name)  # type: ignore[arg-type]
    )
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).eval()
    equal = logprobs_of(model)
    verify(config, equal, dtype)
    matrix = model.model.layers[1].mlp.down_proj.weight
    torch.manual_seed(0)
    with torch.no_grad():
        matrix += 0.3 * matrix.std() * torch.randn_like(matrix)
    with pytest.raises(WeightSyncError, match="after the push rollout/0 gives logprobs that differ from the learner's"):
        verify(config, logprobs_of(model), dtype)
    with pytest.raises(WeightSyncError, match="by nan in the mean"):
        verify(config, [*equal[:-1], float("nan")], dtype)


def test_one_token_may_differ_by_the_rounding_of_a_large_bfloat16_logit(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rounded = logprobs_of(model)
    rounded[7] += 0.5
    verify(server_config("hf", model_folder), rounded, torch.bfloat16)
    with pytest.raises(WeightSyncError, match=r"up to 5\.00e-01 \(allowed 1e-03\)"):
        verify(server_config("hf", model_folder), rounded, torch.float32)
