"""Plays episodes with an oracle, a function that writes good replies, for supervised fine-tuning before RL.

The rows contain exactly the tokens that the model sees in RL training, with the oracle's replies instead of samples.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError, raised_at
from async_rl.base.models_and_data.model_folder import end_tokens
from async_rl.base.seams import import_object
from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import Message, Schema
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import ReplyReader
from rollout_server.episodes.conversation.session import Reply, Session, SessionLimits
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.multi_turn import EpisodePlayer, open_tool_parser
from rollout_server.rewards.scoring import Scoring, open_rewards
from rollout_server.tasks.base import open_task

_NO_TOOLS = "knows no tools, set sft.base to tiny-qwen3-tools, or to the folder of a model that knows them"

Oracle = Callable[[Sequence[Message], random.Random], str]
"""A function from (the conversation so far, a source of random numbers) to a reply. It writes tool calls as text of the
reply, in the form of the model's chat template."""

_conversation: ContextVar[Sequence[Message]] = ContextVar("conversation")
"""The messages to which the oracle replies."""


class Demonstrator:
    """Plays the episodes of a task with replies of `sft.oracle`. `async-rl sft` trains the model on these episodes.

    The environment, agent and tools are the same as in RL training. An agent in a separate process writes its output to
    a file next to the model, for example runs/a/model.agent.log.

    Args:
        tokenizer: the tokenizer of sft.base.

    Raises:
        ConfigError: the environment, the agent, a tool, the questions or the oracle can't be loaded, or the chat
            template can't be used.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        base, model = Path(config.sft.base), Path(config.model.path)
        self._config = config
        self._tokenizer = tokenizer
        self._task = open_task(config, tokenizer)
        self._oracle = load_oracle(config.sft.oracle)
        try:
            parse = open_tool_parser(config, tokenizer, server_url="")
        except ConfigError as error:
            raise ConfigError(f"{error}. If the chat template of sft.base {_NO_TOOLS}") from None
        ends = end_tokens(base) if base.is_dir() else [tokenizer.eos_token_id]
        log_file = model.with_name(f"{model.name}.agent.log")  # the model's own folder appears only when it is whole
        self._episodes = EpisodePlayer(config, tokenizer, ends, parse, log_file, on_timeout="partial")
        self._limits = SessionLimits(
            max_tokens=config.longest_tokens, max_reply_tokens=config.rollout.max_response_tokens,
            max_turns=config.rollout.max_turns,
        )  # fmt: skip
        self._rewards = open_rewards(config, self._task)

    def play(self, count: int) -> list[Episode]:
        """Play and return one episode for each of the first `count` prompts, or for all prompts if there are fewer.

        The same run.seed gives the same episodes. Failed episodes have no rows.

        Raises:
            ConfigError: the oracle raised or returned no text, the chat template does not know the tools of the
                environment or agent, or every episode failed.
        """
        return asyncio.run(self._play(min(count, self._task.num_prompts)))

    async def _play(self, count: int) -> list[Episode]:
        places = asyncio.Semaphore(self._config.task.max_concurrent_calls)
        scoring = Scoring(self._config, self._rewards)

        async def play_one(index: int) -> Episode:
            async with places:
                return await self._episode(index, scoring)

        try:
            episodes = await asyncio.gather(*map(play_one, range(count)))
        finally:
            await scoring.aclose()
            await self._episodes.aclose()
        if not any(episode.rows for episode in episodes):
            raise ConfigError(f"all episodes of sft.oracle {self._config.sft.oracle!r} failed: {episodes[0].error}")
        return episodes

    async def _episode(self, index: int, scoring: Scoring) -> Episode:
        prompt, seed = self._task.prompt(index), self._config.run.seed + index
        rng = random.Random(seed)

        def open_session() -> Session:
            return OracleSession(
                self._oracle, rng, self._tokenizer, self._episodes.renderer, self._episodes.reader, self._limits,
                self._config.sft.base,
            )  # fmt: skip

        episode = await self._episodes.play(prompt, itertools.repeat(seed), open_session)
        if self._config.task.agent or not self._rewards or not episode.rows:
            return episode
        (verdict,) = await scoring.score(prompt.question, [episode])
        return episode if verdict.reward is None else episode.with_reward(verdict.reward)


class OracleSession(Session):
    """A session whose replies come from an oracle. Each reply ends with the end-of-text token; all logprobs are 0.

    A reply that is too long is cut where the engine would cut it.

    Args:
        base: sft.base, for error messages.
    """

    def __init__(
        self, oracle: Oracle, rng: random.Random, tokenizer: Any, renderer: TurnRenderer, reader: ReplyReader,
        limits: SessionLimits, base: str,
    ) -> None:  # fmt: skip
        async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
            text = oracle(_conversation.get(), rng)
            reply = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            is_cut = len(reply) > max_tokens
            zeros = np.zeros(min(len(reply), max_tokens))
            return SampledReply(
                tokens=np.array(reply[:max_tokens], np.int32), logprobs=zeros.astype(np.float32),
                versions=zeros.astype(np.int32), finish_reason="length" if is_cut else "stop",
            )  # fmt: skip

        super().__init__(generate, renderer, reader, limits)
        self._base = base

    @asynccontextmanager
    async def offer(
        self, messages: Sequence[Message], tools: Sequence[Schema] = (), **options: Any
    ) -> AsyncIterator[Reply]:
        if tools and not (self._reader.reads_calls and "tool" in self._renderer.roles):
            raise ConfigError(
                f"task.env or task.agent has tools. As the chat template of sft.base {self._base} {_NO_TOOLS}"
            )
        _conversation.set(messages)  # the task that samples the reply inherits it
        async with super().offer(messages, tools, **options) as reply:
            yield reply


def load_oracle(name: str) -> Oracle:
    """Import the oracle `name`, and wrap it: a call raises ConfigError if the oracle fails or returns no text.

    Raises:
        ConfigError: `name` can't be imported, or can't be called with messages and a source of random numbers.
    """
    found = import_object(name, "sft.oracle")
    try:
        inspect.signature(found).bind([], random.Random())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"sft.oracle {name!r} must be a function (messages, rng) that returns a reply: {error}"
        ) from None

    def checked(messages: Sequence[Message], rng: random.Random) -> str:
        try:
            reply = found(messages, rng)
        except Exception as error:
            raise ConfigError(
                f"sft.oracle {name!r} raised {type(error).__name__}: {error}, at {raised_at(error)}"
            ) from error
        if not isinstance(reply, str):
            raise ConfigError(f"sft.oracle {name!r} must return a text, got {reply!r:.200}")
        return reply

    return checked


def summary_of(episodes: Sequence[Episode]) -> str:
    """Return a line of text: the number of episodes with rows, their mean reward, and how many ended early."""
    rewards = [episode.reward for episode in episodes if episode.rows]
    text = f"{len(rewards)} episodes of the oracle, mean reward {sum(rewards) / len(rewards):.3f}"
    others = [episode for episode in episodes if episode.end != "done"]
    return f"{text}; {len(others)} did not end by themselves, the first: {others[0].error}" if others else text
