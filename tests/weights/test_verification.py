"""Verification of a push against a real server, with equal and with different weights."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.base.config import Config, ModelConfig
from async_rl.base.errors import WeightSyncError
from async_rl.base.weights import open_publisher
from async_rl.base.weights.publisher import Tolerance
from learner.loop.pusher import VERIFY_TOKENS, VERIFY_TOLERANCE
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.configs import changed, server_config
from tests.kit.engines.replies import with_engine
from tests.kit.publishers import CONFIG, OBJECT_ENGINE, publisher_for, url_of

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
        matrix.copy_(matrix.std() * torch.randn_like(matrix))
    with pytest.raises(WeightSyncError, match="rollout/0"):
        verify(config, logprobs_of(model), dtype)
    with pytest.raises(WeightSyncError, match="nan"):
        verify(config, [*equal[:-1], float("nan")], dtype)


class ScoringServer:
    """A server that gives a probe text the same logprob at each token, or can't, or has died."""

    def __init__(self, logprob: float | None, *, is_alive: bool = True) -> None:
        self.logprob, self.is_alive = logprob, is_alive

    def is_ready(self) -> bool:
        return self.is_alive

    def score_tokens(self, tokens: list[int]) -> list[float]:
        if self.logprob is None:
            raise WeightSyncError("connection refused")
        return [self.logprob] * (len(tokens) - 1)


DEAD = ScoringServer(None, is_alive=False)


def compare(*servers: ScoringServer) -> bool:
    config = changed(CONFIG, rollout={"engine": OBJECT_ENGINE})
    publisher = publisher_for(config, [url_of(server) for server in servers])
    publisher.lost_within_s = 0.1
    return publisher.verify([1, 2, 3], [-0.5, -0.5], Tolerance(0.0, 0.0))


def test_a_server_that_died_after_the_push_is_left_out_and_the_others_are_compared() -> None:
    assert compare(DEAD, ScoringServer(-0.5), DEAD)
    assert not compare(DEAD)
    with pytest.raises(WeightSyncError, match="rollout/1"):
        compare(DEAD, ScoringServer(-0.75))


def test_a_live_server_that_can_not_score_is_an_error() -> None:
    with pytest.raises(WeightSyncError, match="rollout/0"):
        compare(ScoringServer(None))


def test_the_rounding_of_bfloat16_alone_takes_at_most_a_third_of_the_tolerance(model_folder: Path) -> None:
    """The same bfloat16 weights: all arithmetic in bfloat16, or all in float32, which kernels lie between."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).eval()
    rounded, exact = logprobs_of(model), logprobs_of(model.float())
    differences = [abs(a - b) for a, b in zip(rounded, exact, strict=True)]
    tolerance = VERIFY_TOLERANCE[torch.bfloat16]
    assert 0 < sum(differences) / len(differences) < tolerance.mean / 3
    assert max(differences) < tolerance.largest / 3


def test_one_token_may_differ_by_the_rounding_of_a_large_bfloat16_logit(model_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    rounded = logprobs_of(model)
    rounded[7] += 0.5
    verify(server_config("hf", model_folder), rounded, torch.bfloat16)
    with pytest.raises(WeightSyncError, match=r"5\.00e-01"):
        verify(server_config("hf", model_folder), rounded, torch.float32)
