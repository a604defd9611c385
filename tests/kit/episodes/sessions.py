"""An engine that samples random tokens and remembers what it saw, and sessions with it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import ReplyReader
from rollout_server.episodes.conversation.session import Session, SessionLimits
from tests.kit.engines.fakes import completion

LIMITS = SessionLimits(max_tokens=2000, max_reply_tokens=8, max_turns=50)


class RandomEngine:
    """Samples any tokens, special ones too. Each token has its own logprob, so that every token can be told apart."""

    def __init__(self, seed: int, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self.rng = random.Random(seed)
        self.vocab_size = vocab_size
        self.end_tokens = end_tokens
        self.calls: list[tuple[list[int], SampledReply]] = []
        """The tokens that the engine saw, and its reply, of each call that was not cancelled."""
        self.version = 0
        self.num_sampled = 0

    async def generate(self, tokens: list[int], max_tokens: int) -> SampledReply:
        tokens = list(tokens)
        await asyncio.sleep(0)
        sampled = [self.rng.randrange(self.vocab_size) for _ in range(self.rng.randint(1, max_tokens))]
        sampled = [token for token in sampled if token not in self.end_tokens] or [0]
        ended = len(sampled) < max_tokens and self.rng.random() < 0.8
        if ended:
            sampled.append(self.rng.choice(list(self.end_tokens)))
        versions = []
        for _ in sampled:
            self.version += self.rng.random() < 0.1
            versions.append(self.version)
        logprobs = -1e-3 * np.arange(self.num_sampled + 1, self.num_sampled + len(sampled) + 1, dtype=np.float32)
        self.num_sampled += len(sampled)
        reply = SampledReply(
            tokens=np.array(sampled, np.int32),
            logprobs=logprobs,
            versions=np.array(versions, np.int32),
            finish_reason="stop" if ended else "length",
        )
        self.calls.append((tokens, reply))
        return reply


def scripted(tokenizer: Any, replies: Sequence[str]) -> Callable[[list[int], int], Awaitable[SampledReply]]:
    """A `Generate` that answers with these texts, one after the other, each with the end token."""
    left = list(replies)

    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        await asyncio.sleep(0)
        text = tokenizer(left.pop(0), add_special_tokens=False)["input_ids"]
        return completion([*text, tokenizer.eos_token_id])

    return generate


def session_of(
    generate: Callable[[list[int], int], Awaitable[SampledReply]],
    tokenizer: Any,
    end_tokens: Sequence[int],
    limits: SessionLimits = LIMITS,
) -> Session:
    return Session(generate, TurnRenderer(tokenizer, end_tokens), ReplyReader(tokenizer, end_tokens, None), limits)
