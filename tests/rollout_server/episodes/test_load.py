from __future__ import annotations

from typing import Any

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.episodes.agents import load_agent
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step, load_env
from rollout_server.question import Question

HERE = "tests.rollout_server.episodes.test_load"
QUESTION = Question(messages=({"role": "user", "content": "2+2?"},), ground_truth="4")


class Asking:
    tools = ()

    def __init__(self, question: Question, seed: int, level: int = 1) -> None:
        self.values = (question, seed, level)

    async def start(self) -> list[Message]:
        return [user("hi")]

    async def step(self, reply: Message) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        pass


class NotAsync:
    tools = ()

    def start(self) -> list[Message]:
        return []

    async def step(self, reply: Message) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        pass


def solve(question: Question, base_url: str, api_key: str) -> float:
    return 1.0


def takes_nothing() -> float:
    return 1.0


def test_an_environment_gets_the_arguments_that_it_names() -> None:
    env: Any = load_env(f"{HERE}:Asking", {"level": 3}, True)(QUESTION, 5, 6)
    assert env.values == (QUESTION, 6, 3)


@pytest.mark.parametrize(("name", "params", "has_questions"), [
    ("Asking", {"color": 1}, True), ("NotAsync", {}, True), ("solve", {}, True), ("Missing", {}, True),
    ("Asking", {}, False),  # it needs questions
])
def test_an_environment_that_can_not_be_made_is_refused(name: str, params: dict[str, Any], has_questions: bool) -> None:
    with pytest.raises(ConfigError, match=r"^task\.env "):
        load_env(f"{HERE}:{name}", params, has_questions)


def test_an_agent_is_a_function_with_three_arguments() -> None:
    assert load_agent(f"{HERE}:solve") is solve
    with pytest.raises(ConfigError, match="takes_nothing"):
        load_agent(f"{HERE}:takes_nothing")
