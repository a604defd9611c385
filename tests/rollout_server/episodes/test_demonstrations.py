"""An oracle plays an environment for a warm start; whatever is wrong with it is said at once."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
from openai import OpenAI

from async_rl.base.config import TaskConfig
from async_rl.base.errors import ConfigError
from learner.models.tiny_model import character_tokenizer, tool_tokenizer
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.demonstrations import Demonstrator, summary_of
from rollout_server.episodes.env import Step
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.tools.tool import Tool
from rollout_server.question import Question
from tests.kit.configs import make_config

HERE = __name__
TOKENIZER = character_tokenizer()


class Ask:
    """Shows the question, or `?` without one, then `more`; a reply to that ends the episode."""

    tools: Sequence[Tool] = ()

    def __init__(self, question: Question | None = None) -> None:
        self._shown = [user(question.messages[0]["content"] if question else "?"), user("more")]

    async def start(self) -> list[Message]:
        return [self._shown.pop(0)]

    async def step(self, reply: Message) -> Step:
        return Step(messages=(self._shown.pop(0),)) if self._shown else Step(done=True, reward=0.5)

    async def close(self) -> None:
        pass


class Broken(Ask):
    """Fails in its first step."""

    async def step(self, reply: Message) -> Step:
        raise KeyError("no such room")


def echo(messages: Sequence[Message], rng: random.Random) -> str:
    return messages[-1]["content"]


def fails(messages: Sequence[Message], rng: random.Random) -> str:
    raise ValueError("out of ideas")


def says_box(question: Question, response: str) -> float:
    return 0.5 * response.endswith("box")


def takes_one(messages: Sequence[Message]) -> str:
    return ""


def play(env: str = f"{HERE}:Ask", oracle: str = f"{HERE}:echo", count: int = 3, **settings: Any) -> list[Episode]:
    config = make_config(task=TaskConfig(env=env, size=100), rollout=settings, sft={"oracle": oracle})
    return Demonstrator(config, TOKENIZER).play(count)


def test_episodes_hold_the_tokens_that_the_model_will_meet_and_train_on_replies() -> None:
    episodes = play()
    assert [len(episode.rows) for episode in episodes] == [1, 1, 1]
    (row,) = episodes[0].rows
    assert TOKENIZER.decode(row.tokens) == "?<sep>?<eos>\nmore<sep>more<eos>"
    assert TOKENIZER.decode(row.tokens[row.mask]) == "?<eos>more<eos>"
    assert [episode.reward for episode in episodes] == [0.5] * 3


CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "box"}}\n</tool_call>'


def look(place: str) -> str:
    """Look somewhere.

    Args:
        place: where to look.
    """
    return f"a cat in the {place}"


def calls_once(messages: Sequence[Message], rng: random.Random) -> str:
    """An oracle that looks into the box, and says what it saw."""
    return messages[-1]["content"] if messages[-1]["role"] == "tool" else CALL


class Room(Ask):
    """Has a tool that the episode calls, and ends with the reply after it."""

    tools: Sequence[Any] = (look,)

    async def start(self) -> list[Message]:
        return [user("what is there?")]

    async def step(self, reply: Message) -> Step:
        return Step(done=True, reward=float(reply["content"] == "a cat in the box"))


def asks(question: Question, base_url: str, api_key: str) -> float:
    """An agent with OpenAI's client, which blocks."""
    tools: list[Any] = [Tool.from_function(look).schema]
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = list(question.messages)
        said = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        for call in said.tool_calls or ():
            result = {"role": "tool", "tool_call_id": call.id, "content": look(**json.loads(call.function.arguments))}
            messages += [said.model_dump(exclude_none=True), result]
        said = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        return float(said.content == "a cat in the box")


SPELL = "reasoning_gym/spell_backward"


@pytest.mark.parametrize(
    ("task", "reward"),
    [
        (TaskConfig(env=f"{HERE}:Room", size=4), 1.0),
        (TaskConfig(name=SPELL, size=4, tools=[f"{HERE}:look"], reward=f"{HERE}:says_box"), 0.5),
        (TaskConfig(name=SPELL, size=4, agent=f"{HERE}:asks"), 1.0),
    ],
    ids=["environment", "tools", "agent"],
)
def test_an_oracle_calls_the_tools_of_environments_tasks_and_agents(task: TaskConfig, reward: float) -> None:
    config = make_config(
        task=task, rollout={"max_response_tokens": 200, "max_episode_tokens": 900},
        sft={"base": "tiny-qwen3-tools", "oracle": f"{HERE}:calls_once"},
    )  # fmt: skip
    tokenizer = tool_tokenizer()
    episodes = Demonstrator(config, tokenizer).play(3)
    assert [episode.reward for episode in episodes] == [reward] * 3, episodes[0].error
    for (row,) in (episode.rows for episode in episodes):
        assert tokenizer.decode(row.tokens[row.mask]) == f"{CALL}<|im_end|>a cat in the box<|im_end|>"
        context = tokenizer.decode(row.tokens[~row.mask])
        assert '<tools>\n{"type": "function"' in context
        assert "<tool_response>\na cat in the box\n</tool_response>" in context


def test_a_reply_and_an_episode_are_cut_off_at_the_limits_of_the_run() -> None:
    (episode,) = play(count=1, max_response_tokens=3)
    assert TOKENIZER.decode(episode.rows[0].tokens) == "?<sep>?<eos>\nmore<sep>mor"
    (episode,) = play(count=1, max_turns=1)
    assert TOKENIZER.decode(episode.rows[0].tokens) == "?<sep>?<eos>"
    assert episode.end == "turns" and episode.error in summary_of([episode])


@pytest.mark.parametrize(("names", "named"), [
    ({"oracle": f"{HERE}:nobody"}, r"sft\.oracle "), ({"oracle": f"{HERE}:takes_one"}, r"sft\.oracle "),
    ({"oracle": f"{HERE}:fails"}, r"sft\.oracle "), ({"env": f"{HERE}:echo"}, r"task\.env "),
    ({"env": f"{HERE}:Room"}, r"task\.env .*sft\.base "), ({"env": f"{HERE}:Broken"}, ".*KeyError"),
])  # fmt: skip
def test_what_is_wrong_with_an_oracle_or_its_environment_is_an_error(names: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{named}"):
        play(**names)
