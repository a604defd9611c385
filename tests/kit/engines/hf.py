"""Requests, and tiny models with large random weights, which make tokens differ and mixed caches visible."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from async_rl.config import Config, ModelConfig, RolloutConfig, TaskConfig
from async_rl.types import Prompt
from learner.models.tiny_model import character_tokenizer, tiny_model
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.engines.hf.engine import HFEngine

Result = TypeVar("Result")
TOLERANCE = 1e-4


def sharp_model(name: str, seed: int) -> PreTrainedModel:
    """A tiny model with eight times the initial weights. Without that its tokens would be almost equally likely."""
    model = tiny_model(name, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def save_sharp_model(folder: Path, name: str = "tiny-qwen2", seed: int = 0) -> Path:
    sharp_model(name, seed).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def config_for(folder: Path, **rollout: Any) -> Config:
    return Config(
        model=ModelConfig(path=str(folder)), task=TaskConfig(name="reasoning_gym/spell_backward"),
        rollout=RolloutConfig(engine="hf", **rollout),
    )


def request_for(index: int, **changes: Any) -> GenerationRequest:
    """A request whose prompt has a length and contents that depend on `index`."""
    tokens = np.random.default_rng(index).integers(4, 100, size=5 + index % 9).astype(np.int32)
    prompt = Prompt(index=index, tokens=tokens, text="", question=None)
    request = GenerationRequest(
        group_id=index, prompt=prompt, start_version=0, seed=1, n=4, max_tokens=12, temperature=1.0
    )
    return dataclasses.replace(request, **changes)


def with_engine(config: Config, use: Callable[[HFEngine], Awaitable[Result]]) -> Result:
    async def run() -> Result:
        engine = HFEngine(config, 0)
        await engine.start()
        try:
            return await asyncio.wait_for(use(engine), 180)
        finally:
            await engine.aclose()

    return asyncio.run(run())


def recomputed_logprobs(
    model: PreTrainedModel, request: GenerationRequest, reply: SampledReply, first: int = 0,
    cache: Any = None,
) -> np.ndarray:
    """Logprobs [T - first] of the response's tokens from `first` on, by one forward over prompt and response."""
    sequence = torch.from_numpy(np.concatenate([request.prompt.tokens, reply.tokens])).long()
    skip = 0 if cache is None else cache.get_seq_length()
    with torch.no_grad():
        output = model(input_ids=sequence[None, skip:], past_key_values=cache, use_cache=cache is not None)
    start = len(request.prompt.tokens) + first
    logits = output.logits[0, start - skip - 1 : -1].float()
    logprobs = torch.log_softmax(logits / request.temperature, dim=-1)
    return logprobs.gather(1, sequence[start:, None]).squeeze(1).numpy()


def same_replies(left: list[SampledReply], right: list[SampledReply]) -> bool:
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(left, right, strict=True)
    )
