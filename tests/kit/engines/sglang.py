"""Requests to a running SGLang server, and comparisons of its answers with transformers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.types import IntArray
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.engines.sglang.admin import SGLangAdmin
from tests.conftest import EngineInThread

TOLERANCE = 1e-4


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs_of(model: PreTrainedModel, prompt: IntArray, reply: IntArray, temperature: float) -> np.ndarray:
    """log_softmax(logits / temperature) of each reply token, computed from scratch."""
    ids = torch.tensor([[*prompt.tolist(), *reply.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def generate(server: EngineInThread, *groups: GenerationRequest) -> list[list[SampledReply]]:
    async def run() -> list[list[SampledReply]]:
        return list(await asyncio.gather(*map(server.engine.generate, groups)))

    return server.run(run())


def largest_error(
    model: PreTrainedModel, groups: list[GenerationRequest], replies: list[list[SampledReply]]
) -> float:
    return max(
        float(np.abs(a.logprobs - logprobs_of(model, g.prompt.tokens, a.tokens, g.temperature)).max())
        for g, of_group in zip(groups, replies, strict=True)
        for a in of_group
    )


def update_in_place(server: EngineInThread, model: Path, version: int) -> None:
    """Load new weights from disk under running requests, as a weight push does."""
    admin = SGLangAdmin(server.config, server.engine.url)
    admin.pause("in_place")
    admin.begin_update()
    admin.load_folder(model, version)
    admin.end_update()
    admin.resume()
