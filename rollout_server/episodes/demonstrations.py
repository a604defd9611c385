"""Plays an environment with an oracle, a function that writes good replies, for supervised fine-tuning before RL.

The rows hold exactly the tokens that the model meets in training, with the oracle's replies in place of sampled ones.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config import Config
from async_rl.errors import ConfigError, raised_at
from async_rl.seams import import_object
from async_rl.storage.model_folder import end_tokens
from rollout_server.engines.base import Completion
from rollout_server.episodes.env import Env, Step
from rollout_server.episodes.env_runner import EnvRunner
from rollout_server.episodes.episode import Episode, EpisodeLimits
from rollout_server.episodes.load import load_task_env
from rollout_server.episodes.messages import Message
from rollout_server.episodes.rendering import TurnRenderer
from rollout_server.episodes.reply_reader import ReplyReader
from rollout_server.episodes.session import Session, SessionLimits
from rollout_server.tasks.base import open_task

Oracle = Callable[[Sequence[Message], random.Random], str]
"""Takes the conversation so far and a source of random numbers, returns a reply."""


class Demonstrator:
    """Plays episodes of `task.env` with the replies of `sft.oracle`; `async-rl sft` trains on them.

    Args:
        tokenizer: that of sft.base.

    Raises:
        ConfigError: the environment, its questions or the oracle can't be loaded, or the chat template can't be used.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        base = Path(config.sft.base)
        self._config = config
        self._tokenizer = tokenizer
        self._task = open_task(config, tokenizer)
        self._make_env = load_task_env(config)
        self._oracle = load_oracle(config.sft.oracle)
        self._renderer = TurnRenderer(tokenizer, end_tokens(base) if base.is_dir() else [tokenizer.eos_token_id])

    def play(self, count: int) -> list[Episode]:
        """Play one episode for each of the first `count` prompts, or for all if there are fewer, and return them.

        The same run.seed gives the same episodes. Those that failed have no rows.

        Raises:
            ConfigError: the oracle raised or returned no text, the environment has tools, or every episode failed.
        """
        return asyncio.run(self._play(min(count, self._task.num_prompts)))

    async def _play(self, count: int) -> list[Episode]:
        config, timeouts = self._config, self._config.timeouts
        times = EpisodeLimits(
            tool_s=timeouts.tool_s, turn_s=timeouts.turn_s, episode_s=timeouts.episode_s, on_timeout="partial"
        )
        runner = EnvRunner(times, config.task.max_concurrent_calls)
        sizes = SessionLimits(
            max_tokens=config.longest_tokens, max_reply_tokens=config.rollout.max_response_tokens,
            max_turns=config.rollout.max_turns,
        )  # fmt: skip
        places = asyncio.Semaphore(config.task.max_concurrent_calls)

        async def play_one(index: int) -> Episode:
            async with places:
                seed, open_env = config.run.seed + index, partial(self._open_env, index)
                return await demonstrate(
                    runner, open_env, self._oracle, seed, self._tokenizer, self._renderer, sizes
                )

        episodes = await asyncio.gather(*map(play_one, range(count)))
        if not any(episode.rows for episode in episodes):
            raise ConfigError(f"task.env {config.task.env!r}: all episodes of sft.oracle failed: {episodes[0].error}")
        return episodes

    def _open_env(self, index: int) -> Env:
        env = self._make_env(self._task.prompt(index), self._config.run.seed + index)
        if env.tools:
            raise ConfigError(
                f"sft.oracle must be empty with task.env {self._config.task.env!r}, which has tools: an oracle returns "
                "text, and can't call them"
            )
        return env


def load_oracle(name: str) -> Oracle:
    """Return the oracle `name`. When called, it raises ConfigError too: if it fails, or returns no text.

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
    """Return a line with the number of episodes, their mean reward, and how many of them did not end by themselves."""
    rewards = [episode.reward for episode in episodes if episode.rows]
    text = f"{len(rewards)} episodes of the oracle, mean reward {sum(rewards) / len(rewards):.3f}"
    others = [episode for episode in episodes if episode.end != "done"]
    return f"{text}; {len(others)} did not end by themselves, the first: {others[0].error}" if others else text


async def demonstrate(
    runner: EnvRunner,
    open_env: Callable[[], Env],
    oracle: Oracle,
    seed: int,
    tokenizer: Any,
    renderer: TurnRenderer,
    limits: SessionLimits,
) -> Episode:
    """Return one episode played with the oracle's replies, each ended by the end-of-text token. All logprobs are 0.

    A reply that is too long is cut off where the engine would cut it off.
    """
    watched: list[_Watched] = []
    rng = random.Random(seed)

    def open_watched() -> Env:
        watched[:] = [_Watched(open_env())]
        return watched[0]

    async def generate(tokens: list[int], max_tokens: int) -> Completion:
        text = oracle(watched[0].messages, rng)
        reply = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        is_cut = len(reply) > max_tokens
        zeros = np.zeros(min(len(reply), max_tokens))
        return Completion(
            tokens=np.array(reply[:max_tokens], np.int32), logprobs=zeros.astype(np.float32),
            versions=zeros.astype(np.int32), finish_reason="length" if is_cut else "stop",
        )  # fmt: skip

    reader = ReplyReader(tokenizer, [tokenizer.eos_token_id], None)
    return await runner.run(open_watched, partial(Session, generate, renderer, reader, limits))


class _Watched:
    """Wraps an environment and keeps the conversation in `messages`, for the oracle to read."""

    def __init__(self, env: Env) -> None:
        self.tools = env.tools
        self.messages: list[Message] = []
        self._env = env

    async def start(self) -> Sequence[Message]:
        self.messages = list(await self._env.start())
        return self.messages

    async def step(self, reply: Message) -> Step:
        step = await self._env.step(reply)
        self.messages += [reply, *step.messages]
        return step

    async def close(self) -> None:
        await self._env.close()
