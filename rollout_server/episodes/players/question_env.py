"""A question with tools as an environment: one answer after any number of calls."""

from __future__ import annotations

from collections.abc import Sequence

from rollout_server.episodes.conversation.messages import Message
from rollout_server.episodes.env import Step
from rollout_server.episodes.tools.tool import Tool
from rollout_server.question import Question


class QuestionEnv:
    """Asks a question, and is done with the first reply that calls no tool.

    It gives no reward. The reward function of the run scores the answers of a whole group, see `Episode.answer`.
    """

    def __init__(self, question: Question, tools: Sequence[Tool]) -> None:
        self.tools = tools
        self._question = question

    async def start(self) -> list[Message]:
        return [Message(role=said["role"], content=said["content"]) for said in self._question.messages]

    async def step(self, reply: Message) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        pass
