"""Requests to engines, their replies, and the logprobs that these must have."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from async_rl.base.config import Config, Sampling
from async_rl.base.types import FloatArray, IntArray, Prompt, Support
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.engines.in_thread import EngineInThread

Result = TypeVar("Result")
TOLERANCE = 1e-4
"""The largest difference of a logprob between two correct ways to compute it in float32."""
SUPPORT_TOLERANCE = 2e-5
"""The same over the ids that a token was drawn from."""


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


def over_updates(
    config: Config, request: GenerationRequest, models: dict[int, Any], keep_kv: bool
) -> list[SampledReply]:
    """The replies of an hf engine that loads versions 1 and 2 while it samples."""

    async def update_inside(engine: HFEngine) -> list[SampledReply]:
        running = asyncio.create_task(engine.generate(request))
        for version in (1, 2):
            for _ in range(8):  # each takes one token or more
                await engine.between_tokens(lambda: None)
            await engine.pause(keep_kv=keep_kv)
            await engine.load_weights(dict(models[version].named_parameters()), version)
            engine.resume()
        return await running

    return with_engine(config, update_inside)


def from_scratch(
    model: PreTrainedModel, prompt: IntArray, reply: IntArray, temperature: float, forbidden: Sequence[int] = (),
    support: Support | None = None,
) -> FloatArray:
    """Logprobs [T] of the tokens of a reply under a model's weights, by one forward over prompt and reply.

    Args:
        forbidden: tokens without which the distributions are.
        support: the ids that they are over, if these are not all.
    """
    return of_tokens(distributions(model, prompt, reply, temperature, forbidden), reply, support)


def distributions(
    model: PreTrainedModel, prompt: IntArray, reply: IntArray, temperature: float, forbidden: Sequence[int] = ()
) -> torch.Tensor:
    """Logprobs [T, V] of all tokens where the tokens of a reply were sampled."""
    sequence = torch.from_numpy(np.concatenate([prompt, reply])).long()
    with torch.no_grad():
        logits = model(input_ids=sequence[None]).logits[0, len(prompt) - 1 : -1]
        logits[:, list(forbidden)] = -torch.inf
    return torch.log_softmax(logits.float() / temperature, dim=-1)


def of_tokens(logprobs: torch.Tensor, tokens: IntArray, support: Support | None) -> FloatArray:
    """Of the logprobs [T, V] those of the tokens, [T], over the ids of their supports if these are given."""
    chosen = logprobs[torch.arange(len(tokens)), torch.from_numpy(tokens).long()]
    if support is not None:
        ids = [support.ids[a:b].tolist() for a, b in itertools.pairwise(support.offsets)]
        masses = [logprobs[place, each].double().logsumexp(0) for place, each in enumerate(ids)]
        chosen = chosen - torch.stack(masses)
    return chosen.float().numpy()


def wrong_sets(logprobs: torch.Tensor, support: Support, sampling: Sampling, allowance: float = 5e-5) -> list[int]:
    """The places whose set is not the one that the sampling keeps of the distribution there.

    Args:
        logprobs: [T, V] of the whole distributions.
        allowance: the mass around the border within which a token may be on its wrong side. Tokens that are as
            probable as the one at the border, but for a share of `allowance`, may also be.
    """
    wrong = []
    for place, row in enumerate(logprobs.double().exp().numpy()):
        order = np.argsort(-row, kind="stable")
        p = row[order]
        before = np.cumsum(p) - p
        least, rank = sampling.min_p * p[0], np.arange(len(p))
        top_k, top_p = min(sampling.top_k or len(p), len(p)), sampling.top_p if sampling.top_p < 1 else 2.0
        ends = p[[top_k - 1, np.searchsorted(before, top_p) - 1]]  # the least probable tokens that each rule keeps
        above, below = (p[:, None] > ends * (1 + sign * allowance) for sign in (1, -1))
        surely = above.all(1) & (before < top_p - allowance) & (rank < top_k) & (p > least * (1 + allowance))
        maybe = (below | np.stack([rank < top_k, before < top_p + allowance], 1)).all(1)
        maybe &= p > least * (1 - allowance)
        found = set(support.ids[support.offsets[place] : support.offsets[place + 1]].tolist())
        if not set(order[surely & (p > 1e-30)].tolist()) <= found <= set(order[maybe].tolist()):
            wrong.append(place)
    return wrong


def recomputed_logprobs(
    model: PreTrainedModel, request: GenerationRequest, reply: SampledReply, forbidden: Sequence[int] = ()
) -> FloatArray:
    """Logprobs [T] of a reply to a request under a model's weights, of distributions without `forbidden`."""
    return from_scratch(
        model, request.prompt.tokens, reply.tokens, request.temperature, forbidden, reply.support
    )


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
