"""Answers questions: the shortest episodes, of one reply, without an environment, an agent or tools.

No code of others takes part in them, and nothing follows their one reply. So all answers to a question are one request
to the engine, and need no session: a session for each would take CPU from the engine.
"""

from __future__ import annotations

from typing import Any

from async_rl.errors import AsyncRLError
from rollout_server.engines.base import GenerationRequest
from rollout_server.episodes.conversation.messages import Message
from rollout_server.episodes.conversation.rows import Node, make_rows
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.players.engine_sampler import GenerateReplies


class SingleTurnPlayer:
    """Plays the episodes of one worker whose task has no turns.

    Args:
        generate: has the engine answer a request.
    """

    def __init__(self, tokenizer: Any, generate: GenerateReplies) -> None:
        self._tokenizer = tokenizer
        self._generate = generate

    async def play(self, request: GenerationRequest) -> list[Episode]:
        """Return `request.n` episodes in order, each with one answer and without a reward.

        Raises:
            AsyncRLError: the engine failed, or did not give `request.n` answers.
            ValueError: the prompt is empty or has a token that the model does not have.
        """
        replies = await self._generate(request)
        if len(replies) != request.n:
            raise AsyncRLError(
                f"the engine must answer request {request.key} with {request.n} replies, got "
                f"{len(replies)}: correct the `generate` of the engine that rollout.engine names"
            )
        question = Node(None, request.prompt.tokens.tolist())
        nodes = [Node(question, reply.tokens.tolist(), reply) for reply in replies]
        messages = request.prompt.question.messages if request.prompt.question else ()
        asked = [Message(role=each["role"], content=each["content"]) for each in messages]
        answers = self._tokenizer.batch_decode([node.tokens for node in nodes], skip_special_tokens=True)
        return [
            Episode(
                rows=tuple(make_rows([node])), answer=answer, end="done",
                messages=(*asked, Message(role="assistant", content=answer)),
            )
            for node, answer in zip(nodes, answers, strict=True)
        ]

    def drain_counts(self) -> dict[str, int]:
        """Return no counts: there is no endpoint for agents."""
        return {}

    def drain_notes(self) -> list[str]:
        """Return no lines for the console: nobody asks for anything."""
        return []

    async def aclose(self) -> None:
        """Do nothing: there is nothing to end."""
