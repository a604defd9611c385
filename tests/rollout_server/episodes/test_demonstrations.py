"""An oracle plays an environment for a warm start; whatever is wrong with it is said at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from async_rl.config import Config, ModelConfig, RolloutConfig, RunConfig, SftConfig, TaskConfig
from async_rl.errors import ConfigError
from learner.models.tiny_model import character_tokenizer
from rollout_server.episodes.demonstrations import Demonstrator, summary_of
from rollout_server.episodes.env import Step
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.messages import Message, user
from rollout_server.episodes.tools import Tool
from rollout_server.question import Question

HERE = __name__
GUESS = "rollout_server.episodes.environments.guess"
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


class WithTools(Ask):
    """Has a tool."""

    tools = (Tool({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}),)


def echo(messages: Sequence[Message], rng: random.Random) -> str:
    return messages[-1]["content"]


def fails(messages: Sequence[Message], rng: random.Random) -> str:
    raise ValueError("out of ideas")


def says_nothing(messages: Sequence[Message], rng: random.Random) -> None:
    return None


def takes_one(messages: Sequence[Message]) -> str:
    return ""


def play(env: str = f"{HERE}:Ask", oracle: str = f"{HERE}:echo", count: int = 3, **settings: Any) -> list[Episode]:
    task = TaskConfig(env=env, size=settings.pop("size", 100), name=settings.pop("name", ""))
    run = RunConfig(seed=settings.pop("seed", 0))
    config = Config(
        model=ModelConfig(path="m"), task=task, run=run, rollout=RolloutConfig(**settings), sft=SftConfig(oracle=oracle)
    )
    return Demonstrator(config, TOKENIZER).play(count)


def test_episodes_hold_the_tokens_that_the_model_will_meet_and_train_on_replies() -> None:
    episodes = play()
    assert [len(episode.rows) for episode in episodes] == [1, 1, 1]
    (row,) = episodes[0].rows
    assert TOKENIZER.decode(row.tokens) == "?<sep>?<eos>\nmore<sep>more<eos>"
    assert TOKENIZER.decode(row.tokens[row.mask]) == "?<eos>more<eos>"
    assert summary_of(episodes) == "3 episodes of the oracle, mean reward 0.500"


def test_an_environment_of_a_task_gets_its_questions() -> None:
    (episode,) = play(name="reasoning_gym/spell_backward", count=1)
    text = TOKENIZER.decode(episode.rows[0].tokens)
    assert "backward" in text.partition("<sep>")[0]


def test_the_seed_determines_the_episodes_and_a_task_has_no_more_than_its_prompts() -> None:
    first, again, other = (
        [row.tokens.tolist() for episode in play(f"{GUESS}:Guess", f"{GUESS}:oracle", 40, seed=seed, size=30)
         for row in episode.rows]
        for seed in (1, 1, 2)
    )  # fmt: skip
    assert first == again != other and len(first) == 30


def test_a_reply_and_an_episode_are_cut_off_at_the_limits_of_the_run() -> None:
    (episode,) = play(count=1, max_response_tokens=3)
    assert TOKENIZER.decode(episode.rows[0].tokens) == "?<sep>?<eos>\nmore<sep>mor"
    (episode,) = play(count=1, max_turns=1)
    assert TOKENIZER.decode(episode.rows[0].tokens) == "?<sep>?<eos>"
    assert "; 1 did not end by themselves, the first: all 1 turns of the episode are taken" in summary_of([episode])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"oracle": f"{HERE}:nobody"}, "sft.oracle .*defines no nobody"),
        ({"oracle": f"{HERE}:takes_one"}, r"sft.oracle .*must be a function \(messages, rng\) that returns a reply"),
        ({"oracle": f"{HERE}:fails"}, "sft.oracle .*raised ValueError: out of ideas, at .*test_demonstrations.py"),
        ({"oracle": f"{HERE}:says_nothing"}, "sft.oracle .*must return a text, got None"),
        ({"env": f"{HERE}:echo"}, "task.env .*must be a class with the `async def` methods"),
        ({"env": f"{HERE}:WithTools"}, "sft.oracle must be empty with task.env .*which has tools"),
        ({"env": f"{HERE}:Broken"}, "all episodes of sft.oracle failed: the environment's step raised KeyError"),
    ],
)
def test_what_is_wrong_with_an_oracle_or_its_environment_is_an_error(names: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        play(**names)


def test_the_base_must_have_a_chat_template_that_only_appends() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ messages | length }}{{ m.content }}{% endfor %}"
    config = Config(
        model=ModelConfig(path="m"), task=TaskConfig(env=f"{HERE}:Ask"), sft=SftConfig(oracle=f"{HERE}:echo")
    )
    with pytest.raises(ConfigError, match="the chat template writes a user message differently"):
        Demonstrator(config, tokenizer)
