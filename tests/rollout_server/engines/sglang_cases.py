"""Requests to a running SGLang server, and what transformers says about its answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import requests
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.types import IntArray
from rollout_server.engines.base import Completion, GenerationRequest
from tests.conftest import EngineInThread

TOLERANCE = 1e-4


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs_of(model: PreTrainedModel, prompt: IntArray, answer: IntArray, temperature: float) -> np.ndarray:
    """log_softmax(logits / temperature) of each answer token, computed from scratch."""
    ids = torch.tensor([[*prompt.tolist(), *answer.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def generate(server: EngineInThread, *groups: GenerationRequest) -> list[list[Completion]]:
    async def run() -> list[list[Completion]]:
        return list(await asyncio.gather(*map(server.engine.generate, groups)))

    return server.run(run())


def largest_error(
    model: PreTrainedModel, groups: list[GenerationRequest], answers: list[list[Completion]]
) -> float:
    return max(
        float(np.abs(a.logprobs - logprobs_of(model, g.prompt.tokens, a.tokens, g.temperature)).max())
        for g, completions in zip(groups, answers, strict=True)
        for a in completions
    )


def update_in_place(url: str, model: Path, version: int) -> None:
    """New weights from disk under running requests, as a weight push does it."""
    for path, body in (
        ("pause_generation", {"mode": "in_place"}),
        ("begin_weight_update", {}),
        ("update_weights_from_disk",
         {"model_path": str(model), "weight_version": str(version), "flush_cache": False}),
        ("end_weight_update", {}),
        ("continue_generation", {}),
    ):
        reply = requests.post(f"{url}/{path}", json=body, timeout=60)
        assert reply.status_code == 200, (path, reply.text)
