"""Requests to engines, their replies, and the logprobs that these must have."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from async_rl.base.config import Config
from async_rl.base.types import FloatArray, IntArray, Prompt
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.engines.in_thread import EngineInThread

Result = TypeVar("Result")
TOLERANCE = 1e-4
"""The largest difference of a logprob between two correct ways to compute it in float32."""


def request_for(index: int, **changes: Any) -> GenerationRequest:
    """A request whose prompt has a length and contents that depend on `index`."""
    tokens = np.random.default_rng(index).integers(4, 100, size=5 + index % 9).astype(np.int32)
    prompt = Prompt(index=index, tokens=tokens, text="", question=None)
    request = GenerationRequest(
        group_id=index, prompt=prompt, start_version=0, seed=1, n=4, max_tokens=12, temperature=1.0
    )
    return dataclasses.replace(request, **changes)


def generate(
    server: EngineInThread, *groups: GenerationRequest, timeout_s: float = 120.0
) -> list[list[SampledReply]]:
    """The replies to all requests, which run at the same time."""

    async def run() -> list[list[SampledReply]]:
        return list(await asyncio.gather(*map(server.engine.generate, groups)))

    return server.run(run(), timeout_s)


def with_engine(config: Config, use: Callable[[HFEngine], Awaitable[Result]]) -> Result:
    """Let `use` ask an hf engine, which lives as long, and return its result."""

    async def run() -> Result:
        engine = HFEngine(config, 0)
        await engine.start()
        try:
            return await asyncio.wait_for(use(engine), 180)
        finally:
            await engine.aclose()

    return asyncio.run(run())


def from_scratch(
    model: PreTrainedModel, prompt: IntArray, reply: IntArray, temperature: float, forbidden: Sequence[int] = ()
) -> FloatArray:
    """Logprobs [T] of the tokens of a reply under a model's weights, by one forward over prompt and reply.

    Args:
        forbidden: tokens without which the distributions are.
    """
    sequence = torch.from_numpy(np.concatenate([prompt, reply])).long()
    with torch.no_grad():
        logits = model(input_ids=sequence[None]).logits[0, len(prompt) - 1 : -1]
        logits[:, list(forbidden)] = -torch.inf
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(1, sequence[len(prompt) :, None]).squeeze(1).numpy()


def recomputed_logprobs(
    model: PreTrainedModel, request: GenerationRequest, reply: SampledReply, forbidden: Sequence[int] = ()
) -> FloatArray:
    """Logprobs [T] of a reply to a request under a model's weights, of distributions without `forbidden`."""
    return from_scratch(model, request.prompt.tokens, reply.tokens, request.temperature, forbidden)


def largest_error(
    model: PreTrainedModel, groups: Sequence[GenerationRequest], replies: Sequence[Sequence[SampledReply]],
    forbidden: Sequence[int] = (),
) -> float:
    """The largest difference of a behaviour logprob to that of the model, without the tokens `forbidden`."""
    return max(
        float(np.abs(reply.logprobs - recomputed_logprobs(model, request, reply, forbidden)).max())
        for request, of_request in zip(groups, replies, strict=True)
        for reply in of_request
    )


def same_replies(left: Sequence[SampledReply], right: Sequence[SampledReply]) -> bool:
    return all(
        np.array_equal(a.tokens, b.tokens) and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(left, right, strict=True)
    )
