"""Plays the episodes of groups. Single-turn tasks need only this file; `multi_turn.py` plays all others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from async_rl.base.errors import AsyncRLError
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.episodes.episode import Episode, Node, whole_row

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
        context = Node(None, request.prompt.tokens.tolist())
        nodes = [Node(context, reply.tokens.tolist(), reply) for reply in replies]
        answers = self._tokenizer.batch_decode([node.tokens for node in nodes], skip_special_tokens=True)
        return [
            Episode(
                rows=(whole_row([context, node]),), answer=answer, end="done",
                messages=(*asked, {"role": "assistant", "content": answer}),
            )
            for node, answer in zip(nodes, answers, strict=True)
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
