"""Lets an oracle play an environment through a real session, for a warm start by supervised fine-tuning.

The rows hold exactly the tokens that the model will meet, with the oracle's replies in place of sampled ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from rollout_server.engines.base import Completion
from rollout_server.episodes.env import Env, Step
from rollout_server.episodes.env_runner import EnvRunner
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.messages import Message
from rollout_server.episodes.rendering import TurnRenderer
from rollout_server.episodes.reply_reader import ReplyReader
from rollout_server.episodes.session import Session, SessionLimits

Oracle = Callable[[Sequence[Message], random.Random], str]
"""Takes the conversation so far and a source of random numbers, returns a reply."""


async def demonstrate(
    runner: EnvRunner,
    env: Env,
    oracle: Oracle,
    seed: int,
    tokenizer: Any,
    renderer: TurnRenderer,
    limits: SessionLimits,
) -> Episode:
    """Play one episode with the oracle's replies, each ended by the end-of-text token. Its logprobs are 0."""
    watched = _Watched(env)
    rng = random.Random(seed)

    async def generate(tokens: list[int], max_tokens: int) -> Completion:
        text = oracle(watched.messages, rng)
        reply = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        zeros = np.zeros(len(reply))
        return Completion(
            tokens=np.array(reply, np.int32), logprobs=zeros.astype(np.float32), versions=zeros.astype(np.int32),
            finish_reason="stop",
        )  # fmt: skip

    reader = ReplyReader(tokenizer, [tokenizer.eos_token_id], None)
    return await runner.run(lambda: watched, partial(Session, generate, renderer, reader, limits))


class _Watched:
    """An environment that remembers the conversation."""

    def __init__(self, env: Env) -> None:
        self.tools = env.tools
        self.messages: list[Message] = []
        self._env = env

    async def start(self) -> Sequence[Message]:
        self.messages = list(await self._env.start())
        return self.messages

    async def step(self, reply: Message) -> Step:
        step = await self._env.step(reply)
        self.messages += [reply, *step.messages]
        return step

    async def close(self) -> None:
        await self._env.close()
