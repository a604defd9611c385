"""Plays the episodes of groups. Single-turn tasks need only this file; `multi_turn.py` plays all others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from async_rl.base.errors import AsyncRLError
from async_rl.base.types import IntArray, Support
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.episodes.episode import Episode, WholeRow

if TYPE_CHECKING:
    from rollout_server.episodes.conversation.chat_messages import Message

GenerateReplies = Callable[[GenerationRequest], Awaitable[list[SampledReply]]]
"""Sends a request to the engine and returns its replies."""

Waiting = Callable[[str, str, float, str], AbstractContextManager[None]]
"""Makes a context that shows a wait in the worker's status; see WorkerStats.waiting."""


class Player(ABC):
    """Plays all episodes of one worker, many at the same time."""

    @abstractmethod
    async def play(self, request: GenerationRequest) -> list[Episode]:
        """Play `request.n` episodes of a group, and return them in order. Failed episodes have no rows.

        Raises:
            AsyncRLError: the engine failed.
        """

    def drain_counts(self) -> dict[str, int]:
        """Return the counts of the agents' endpoint (`requests`, `retries`, ...) since the last call, and reset them.
        """
        return {}

    def drain_notes(self) -> list[str]:
        """Return the new lines for the console since the last call."""
        return []

    async def aclose(self) -> None:
        """Stop the endpoint and the process of agents, if there are any."""
        return None


class SingleTurnPlayer(Player):
    """Plays the episodes of a single-turn task.

    All answers to a question are one request to the engine. There are no sessions: they would take CPU from the engine,
    and the conversation ends with the first reply.
    """

    def __init__(self, tokenizer: Any, generate: GenerateReplies) -> None:
        self._tokenizer = tokenizer
        self._generate = generate

    async def play(self, request: GenerationRequest) -> list[Episode]:
        """Return `request.n` episodes in order, each with one answer and without a reward.

        Raises:
            AsyncRLError: the engine failed, or did not return `request.n` answers.
            ValueError: the prompt is empty or has a token that the model does not have.
        """
        replies = await all_replies(self._generate, request)
        question = request.prompt.question
        asked: list[Message] = [
            {"role": each["role"], "content": each["content"]} for each in (question.messages if question else ())
        ]
        answers = self._tokenizer.batch_decode([reply.tokens.tolist() for reply in replies], skip_special_tokens=True)
        return [
            Episode(
                rows=(_row(request.prompt.tokens, reply),), answer=answer, end="done",
                messages=(*asked, {"role": "assistant", "content": answer}),
            )
            for reply, answer in zip(replies, answers, strict=True)
        ]  # fmt: skip


async def all_replies(generate: GenerateReplies, request: GenerationRequest) -> list[SampledReply]:
    """Send a request to the engine and return its replies. Raises AsyncRLError if their number is not `request.n`."""
    replies = await generate(request)
    if len(replies) != request.n:
        raise AsyncRLError(
            f"the engine must answer request {request.key} with {request.n} replies, got "
            f"{len(replies)}: correct the `generate` of the engine that rollout.engine names"
        )
    return replies


def _row(prompt: IntArray, reply: SampledReply) -> WholeRow:
    """Return the row for a prompt and its reply. It is equal to the row that a session would make."""
    length = len(prompt)
    return WholeRow(
        tokens=np.concatenate([prompt, reply.tokens]).astype(np.int32),
        logprobs=np.concatenate([np.zeros(length, np.float32), reply.logprobs]),
        versions=np.concatenate([np.full(length, reply.versions[0], np.int32), reply.versions]),
        mask=np.arange(length + len(reply.tokens)) >= length, num_start_tokens=length,
        support=reply.support and Support.joined([Support.none(length), reply.support]),
        turn_ends=(length + len(reply.tokens) - 1,), turn_rewards=(0.0,), finish_reason=reply.finish_reason,
        routing=reply.routing,
    )  # fmt: skip
