from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from async_rl.base.config import TaskConfig
from async_rl.base.errors import ConfigError
from async_rl.base.types import Prompt
from learner.models.tiny_model import character_tokenizer
from rollout_server.episodes.agents import load_agent
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step, load_env, load_task_env
from rollout_server.question import Question
from rollout_server.tasks.base import open_task
from tests.kit.configs import make_config

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


class Hard(Asking):
    def __init__(self, question: Question, level: int) -> None:
        super().__init__(question, 0, level)


def test_params_are_those_of_the_task_with_a_name_and_else_of_the_environment() -> None:
    prompt = Prompt(index=3, tokens=np.zeros(1, np.int32), text="", question=QUESTION)

    def opened(env: str, **task: Any) -> Any:
        task = {"env": f"{HERE}:{env}", **task}
        return load_task_env(make_config(task=TaskConfig(**task)))(prompt, 6)

    assert opened("Asking", path="x.jsonl", params={"level": 3}).values == (QUESTION, 6, 3)
    named = {"name": "reasoning_gym/chain_sum", "params": {"min_terms": 3}}
    assert opened("Asking", **named).values == (QUESTION, 6, 1)
    for task in (named, {"path": "x.jsonl"}):
        with pytest.raises(ConfigError, match=r"'level'.*task\.params"):
            opened("Hard", **task)


class Numbered(Asking):
    def __init__(self, index: int, question: Question | None = None) -> None:
        self.index = index


@pytest.mark.parametrize(
    ("name", "trained"), [("reasoning_gym/spell_backward", [0, 1, 2, 3, 4]), ("", [0, 1, 2, 3])], ids=["questions", ""]
)
def test_held_out_episodes_have_negative_indices_with_and_without_questions(name: str, trained: list[int]) -> None:
    config = make_config(task=TaskConfig(name=name, env=f"{HERE}:Numbered", size=4), eval={"num_prompts": 3})
    task, opened = open_task(config, character_tokenizer()), load_task_env(config)

    def indices(prompts: Sequence[Prompt]) -> list[int]:
        envs: list[Any] = [opened(prompt, 0) for prompt in prompts]
        return [env.index for env in envs]

    assert indices(task.eval_prompts()) == [-1, -2, -3]
    assert sorted({*indices([task.prompt(number) for number in range(5)])}) == trained


def test_an_agent_is_a_function_with_three_arguments() -> None:
    assert load_agent(f"{HERE}:solve") is solve
    with pytest.raises(ConfigError, match="takes_nothing"):
        load_agent(f"{HERE}:takes_nothing")
