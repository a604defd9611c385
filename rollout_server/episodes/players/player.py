"""Plays the episodes of groups: with an environment, with an agent, with tools, or as questions and answers.

An episode of several turns passes through these, from the outside to the inside:

    MultiTurnPlayer.play             the n episodes of a request, at the same time
    EnvRunner.run, AgentRunner.run   one episode: once more if the environment or the agent fails
    Attempt.run                      one attempt, within its time limit; closes everything and makes the Episode
    Attempt.play                     turn after turn with the environment, or one call of the agent
    ForeignCode.call                 one call of code that is not ours, within its time limit
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, ConfigError, first_error
from async_rl.base.models_and_data.model_folder import end_tokens
from async_rl.base.network import authorization
from rollout_server.engines.base import GenerationRequest
from rollout_server.episodes.agents.agent_process import START_S, AgentProcess
from rollout_server.episodes.agents.agent_runner import AgentRunner
from rollout_server.episodes.agents.openai_endpoint import OpenAIEndpoint
from rollout_server.episodes.conversation.messages import Message
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import ParseCalls, ReplyReader, open_parser
from rollout_server.episodes.conversation.rows import Node, make_rows
from rollout_server.episodes.conversation.session import Generate, Session, SessionLimits
from rollout_server.episodes.env import Env
from rollout_server.episodes.episode import MAX_ATTEMPTS, Episode, EpisodeLimits
from rollout_server.episodes.players.engine_sampler import GenerateReplies, GroupSampler
from rollout_server.episodes.players.env_runner import EnvRunner
from rollout_server.episodes.players.load import load_agent, load_task_env
from rollout_server.episodes.players.question_env import QuestionEnv
from rollout_server.episodes.tools.tool import load_tools

Waiting = Callable[[str, str, float, str], AbstractContextManager[None]]
"""Shows a wait in the worker's status; see WorkerStats.waiting."""


class Player(Protocol):
    """Plays all episodes of one worker, many at once."""

    async def play(self, request: GenerationRequest) -> list[Episode]:
        """Play `request.n` episodes of a group, and return them in order. Those that failed have no rows.

        Raises:
            AsyncRLError: the engine failed.
        """

    def drain_counts(self) -> dict[str, int]:
        """Return how often `requests`, `retries`, ... happened at the agents' endpoint since the last call."""

    def drain_notes(self) -> list[str]:
        """Return the lines for the console since the last call."""

    async def aclose(self) -> None:
        """End what the episodes needed: the endpoint of agents and the agent's process."""


def open_player(
    config: Config, tokenizer: Any, generate: GenerateReplies, server_url: str, log_file: Path, waiting: Waiting
) -> Player:
    """Return the player of the configured task; see MultiTurnPlayer for the arguments and the errors."""
    if not config.task.has_turns:
        return SingleTurnPlayer(tokenizer, generate)
    return MultiTurnPlayer(config, tokenizer, generate, server_url, log_file, waiting)


class MultiTurnPlayer:
    """Plays episodes of several turns: with an environment, with an agent, or as questions with tools.

    Args:
        generate: has the engine answer a request.
        server_url: the address of the engine, whose parsers of tool calls may be needed.
        log_file: gets what an agent in a process of its own prints.
        waiting: is entered for each episode while it is played. One that waits for a place is not.

    Raises:
        ConfigError: the environment, the agent, a tool, or the format of tool calls can't be used as configured, or the
            model's chat template can't be extended exactly, turn by turn.
    """

    def __init__(
        self, config: Config, tokenizer: Any, generate: GenerateReplies, server_url: str, log_file: Path,
        waiting: Waiting = lambda *_: nullcontext(),
    ) -> None:
        task, timeouts = config.task, config.timeouts
        self._config = config
        self._generate = generate
        limits = EpisodeLimits(
            tool_s=timeouts.tool_s, turn_s=timeouts.turn_s, episode_s=timeouts.episode_s, on_timeout=task.on_timeout
        )
        ends = end_tokens(config.model.path)
        self._renderer = TurnRenderer(tokenizer, ends, task.chat_template_kwargs)
        self._reader = ReplyReader(tokenizer, ends, open_tool_parser(config, tokenizer, server_url))
        waits_on = "its environment" if task.env else "its agent" if task.agent else "its tools"
        longest_s = limits.longest_s + (MAX_ATTEMPTS * START_S if task.agent_python else 0)
        playing = partial(waiting, "plays", waits_on, longest_s, "episodes")
        self._envs = EnvRunner(limits, task.max_concurrent_calls, playing)
        self._tools = load_tools(task.tools)
        if self._tools and "tool" not in self._renderer.roles:
            raise ConfigError(
                f"task.tools must be empty for the model {config.model.path}: its chat template, if there is one, "
                "can't show the results of tools to the model. Use a model whose template knows tools"
            )
        self._make_env = load_task_env(config) if task.env else None
        self._agents: AgentRunner | None = None
        self._endpoint = OpenAIEndpoint()
        self._agent_process: AgentProcess | None = None
        if task.agent:
            if task.agent_python and not os.access(task.agent_python, os.X_OK):
                raise ConfigError(
                    f"task.agent_python must be a Python program, got {task.agent_python}: there is no such file, or "
                    "it can't be run. Make the agent's environment first: python -m venv"
                )
            if task.agent_python:
                self._agent_process = AgentProcess(task.agent, log_file, task.agent_python)
            agent = self._agent_process or load_agent(task.agent)
            self._agents = AgentRunner(agent, self._endpoint, limits, task.max_concurrent_calls, playing)
        self._starting: asyncio.Task[None] | None = None

    async def play(self, request: GenerationRequest) -> list[Episode]:
        """Play `request.n` episodes of a group, and return them in order. Those that failed have no rows.

        Raises:
            AsyncRLError: the engine failed.
        """
        if self._agents is not None:
            if self._starting is None:
                self._starting = asyncio.create_task(self._endpoint.start())
            await asyncio.shield(self._starting)
        sampler = GroupSampler(self._generate, request)
        try:
            async with asyncio.TaskGroup() as group:
                playing = [group.create_task(self._play(request, sampler, sample)) for sample in range(request.n)]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [task.result() for task in playing]

    async def _play(self, request: GenerationRequest, sampler: GroupSampler, sample: int) -> Episode:
        generate = sampler.of_sample(sample)
        if self._agents is not None:
            return await self._agents.run(request.prompt.question, lambda: self._session(request, generate))
        attempts = itertools.count()
        return await self._envs.run(
            lambda: self._open_env(request, sample, attempts), lambda: self._session(request, generate)
        )

    def _open_env(self, request: GenerationRequest, sample: int, attempts: Iterator[int]) -> Env:
        if self._make_env is None:
            return QuestionEnv(request.prompt.question, [tool for make in self._tools for tool in make()])
        source = np.random.SeedSequence((request.seed, request.prompt.index, sample, next(attempts)))
        return self._make_env(request.prompt, int(source.generate_state(1)[0]))

    def _session(self, request: GenerationRequest, generate: Generate) -> Session:
        rollout = self._config.rollout
        limits = SessionLimits(
            max_tokens=self._config.longest_tokens, max_reply_tokens=request.max_tokens,
            max_turns=rollout.max_turns, max_rows=rollout.max_rows,
        )  # fmt: skip
        return Session(generate, self._renderer, self._reader, limits)

    def drain_counts(self) -> dict[str, int]:
        """Return how often `requests`, `retries`, ... happened at the agents' endpoint since the last call."""
        counts, self._endpoint.counts = self._endpoint.counts, Counter()
        return dict(counts)

    def drain_notes(self) -> list[str]:
        """Return what agents asked for in vain and a parser's errors, in lines for the console, since the last call."""
        notes, self._endpoint.notes, self._reader.notes = self._endpoint.notes + self._reader.notes, [], []
        return notes

    async def aclose(self) -> None:
        """End the endpoint of agents and the agent's process, if they were started."""
        if self._starting is not None:
            await self._starting
            await self._endpoint.aclose()
        if self._agent_process is not None:
            await self._agent_process.aclose()


def open_tool_parser(config: Config, tokenizer: Any, server_url: str) -> ParseCalls | None:
    """Return the parser of the model's tool calls, or None: the run needs no parser and none is known.

    Raises:
        ConfigError: task.tools or rollout.tool_parser is set, and no parser of that name or for the template is known.
    """
    url = server_url if config.rollout.engine_entry.parses_tool_calls else ""
    template, headers = tokenizer.chat_template or "", authorization(config.network)
    try:
        return open_parser(config.rollout.tool_parser, template, url, headers)
    except ConfigError:
        if config.task.tools or config.rollout.tool_parser:
            raise
        return None


class SingleTurnPlayer:
    """Plays the episodes of one worker whose task has no turns.

    All answers to a question are one request to the engine, without a session for each: sessions would take CPU from
    the engine, and nothing follows the one reply.

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
