"""Episodes of several turns at a server whose weights change, and the recompute that shows whose KV the turns read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from transformers import PreTrainedModel

from rollout_server.engines.base import Engine, GenerationRequest, SampledReply
from tests.kit.engines.replies import from_scratch, request_for
from tests.kit.engines.tags import segments

Played = list[tuple[GenerationRequest, SampledReply]]
OBSERVED = np.arange(10, 17, dtype=np.int32)
"""The tokens that an environment says between two turns."""
MOST_TOKENS = 400
"""An episode whose history is longer ends, and another of its group begins."""


def next_turn(request: GenerationRequest, reply: SampledReply) -> GenerationRequest:
    tokens = np.concatenate([request.prompt.tokens, reply.tokens, OBSERVED])
    return dataclasses.replace(request, prompt=dataclasses.replace(request.prompt, tokens=tokens))


def error_from_scratch(
    models: Mapping[int, PreTrainedModel], request: GenerationRequest, reply: SampledReply
) -> float:
    """The largest difference to logprobs whose KV is all of the weights that sampled the token."""
    prompt, temperature = request.prompt.tokens, request.temperature
    return max(
        float(np.abs(from_scratch(models[v], prompt, reply.tokens, temperature) - reply.logprobs)[a:b].max())
        for v, a, b in segments(reply.versions)
    )


async def play_over_pushes(engine: Engine, push: Callable[[], int], pushes: int, groups: int = 8) -> Played:
    """Keep the episodes of `groups` groups going while weights change `pushes` times; return all turns."""
    played: Played = []
    is_over = asyncio.Event()

    async def play(group: int) -> None:
        first = request = request_for(group, n=1, max_tokens=24, temperature=0.5)
        while not is_over.is_set():
            (reply,) = await engine.generate(request)
            played.append((request, reply))
            request = next_turn(request, reply) if len(request.prompt.tokens) < MOST_TOKENS else first

    async with asyncio.TaskGroup() as tasks:
        for group in range(1000, 1000 + groups):
            tasks.create_task(play(group))
        for _ in range(pushes):
            for index in range(3):  # the episodes go on for as long as these replies take
                await engine.generate(request_for(2000 + index, max_tokens=30))
            await asyncio.to_thread(push)
        await engine.generate(request_for(2000, max_tokens=30))
        is_over.set()
    return played
