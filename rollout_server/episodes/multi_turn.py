"""Plays the episodes of multi-turn tasks: with an environment, with an agent, or as questions with tools.

An episode passes through these functions, from the outside to the inside:

    MultiTurnPlayer.play             the n episodes of a request, at the same time
    EnvRunner.run, AgentRunner.run   one episode: once more if the environment or the agent fails
    Attempt.run                      one attempt, within its time limit; closes everything and makes the Episode
    Attempt.play                     turn after turn with the environment, or one call of the agent
    ForeignCode.call                 one call of the user's code, within its time limit
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError, first_error
from async_rl.base.models_and_data.model_folder import end_tokens
from async_rl.base.network import authorization
from async_rl.base.types import Prompt
from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import ParseCalls, ReplyReader, open_parser
from rollout_server.episodes.conversation.session import Generate, Session, SessionLimits
from rollout_server.episodes.env import Env, QuestionEnv, load_task_env
from rollout_server.episodes.episode import Episode, GenerateReplies, Player, Waiting, all_replies
from rollout_server.episodes.loop import MAX_ATTEMPTS, EnvRunner, EpisodeLimits
from rollout_server.episodes.tools.tool import load_tools

if TYPE_CHECKING:
    from rollout_server.episodes.agents import AgentRunner


class EpisodePlayer:
    """Plays single episodes of the configured task, each with a session that the caller opens.

    Args:
        ends: the tokens that end a reply.
        parse: the parser of tool calls, or None; see `open_tool_parser`.
        log_file: where a separate process of the agent writes its output.
        on_timeout: see `EpisodeLimits`.
        waiting: makes a context that shows the episode in the worker's status, entered while it is played.

    Raises:
        ConfigError: the environment, the agent or a tool can't be used as configured, or the chat template can't be
            extended exactly, turn by turn.
    """

    def __init__(
        self, config: Config, tokenizer: Any, ends: Sequence[int], parse: ParseCalls | None, log_file: Path,
        on_timeout: Literal["zero", "partial", "drop"], waiting: Waiting = lambda *_: nullcontext(),
    ) -> None:  # fmt: skip
        task, timeouts = config.task, config.timeouts
        self.renderer = TurnRenderer(tokenizer, ends, task.chat_template_kwargs)
        self.reader = ReplyReader(tokenizer, ends, parse)
        self._tools = load_tools(task.tools)
        if self._tools and "tool" not in self.renderer.roles:
            raise ConfigError(
                f"task.tools must be empty for the model {config.model.path}: its chat template, if there is one, "
                "can't show the results of tools to the model. Use a model whose template knows tools"
            )
        limits = EpisodeLimits(
            tool_s=timeouts.tool_s, turn_s=timeouts.turn_s, episode_s=timeouts.episode_s, on_timeout=on_timeout
        )
        self.agents: AgentRunner | None = None
        self._make_env = load_task_env(config) if task.env else None
        waits_on, longest_s = "its environment" if task.env else "its tools", limits.longest_s
        if task.agent:
            from rollout_server.episodes.agents import START_S, open_agents

            waits_on, longest_s = "its agent", longest_s + (MAX_ATTEMPTS * START_S if task.agent_python else 0)
        playing = partial(waiting, "plays", waits_on, longest_s, "episodes")
        if task.agent:
            self.agents = open_agents(task, log_file, limits, playing)
        self._envs = EnvRunner(limits, task.max_concurrent_calls, playing)

    async def play(self, prompt: Prompt, env_seeds: Iterator[int], open_session: Callable[[], Session]) -> Episode:
        """Play an episode and return it.

        Args:
            env_seeds: one seed of the environment for each attempt.

        Raises:
            AsyncRLError: the engine failed, or the process of the agent can't start.
        """
        if self.agents is not None:
            return await self.agents.run(prompt.question, open_session)
        return await self._envs.run(lambda: self._open_env(prompt, env_seeds), open_session)

    def _open_env(self, prompt: Prompt, seeds: Iterator[int]) -> Env:
        if self._make_env is None:
            return QuestionEnv(prompt.question, [tool for make in self._tools for tool in make()])
        return self._make_env(prompt, next(seeds))

    async def aclose(self) -> None:
        """Stop the endpoint and the process of agents, if there are any."""
        if self.agents is not None:
            await self.agents.aclose()


class MultiTurnPlayer(Player):
    """Plays the groups of a worker whose task has several turns.

    Args:
        generate: sends a request to the engine.
        server_url: the address of the engine, whose parsers of tool calls may be needed.
        log_file, waiting: see EpisodePlayer.

    Raises:
        ConfigError: the format of tool calls is not known, or an error of EpisodePlayer.
    """

    def __init__(
        self, config: Config, tokenizer: Any, generate: GenerateReplies, server_url: str, log_file: Path,
        waiting: Waiting = lambda *_: nullcontext(),
    ) -> None:  # fmt: skip
        self._config = config
        self._generate = generate
        ends, parse = end_tokens(config.model.path), open_tool_parser(config, tokenizer, server_url)
        self._episodes = EpisodePlayer(config, tokenizer, ends, parse, log_file, config.task.on_timeout, waiting)

    async def play(self, request: GenerationRequest) -> list[Episode]:
        sampler = GroupSampler(self._generate, request)
        try:
            async with asyncio.TaskGroup() as group:
                playing = [group.create_task(self._play(request, sampler, sample)) for sample in range(request.n)]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        return [task.result() for task in playing]

    async def _play(self, request: GenerationRequest, sampler: GroupSampler, sample: int) -> Episode:
        generate = sampler.of_sample(sample)
        sources = (
            np.random.SeedSequence((request.seed, request.prompt.index, sample, attempt))
            for attempt in itertools.count()
        )
        seeds = (int(source.generate_state(1)[0]) for source in sources)
        return await self._episodes.play(request.prompt, seeds, lambda: self._session(request, generate))

    def _session(self, request: GenerationRequest, generate: Generate) -> Session:
        rollout = self._config.rollout
        limits = SessionLimits(
            max_tokens=self._config.longest_tokens, max_reply_tokens=request.max_tokens,
            max_turns=rollout.max_turns, max_rows=rollout.max_rows,
        )  # fmt: skip
        return Session(generate, self._episodes.renderer, self._episodes.reader, limits)

    def drain_counts(self) -> dict[str, int]:
        if (agents := self._episodes.agents) is None:
            return {}
        counts, agents.endpoint.counts = agents.endpoint.counts, Counter()
        return dict(counts)

    def drain_notes(self) -> list[str]:
        reader, agents = self._episodes.reader, self._episodes.agents
        notes, reader.notes = reader.notes, []
        if agents is not None:
            notes, agents.endpoint.notes = [*agents.endpoint.notes, *notes], []
        return notes

    async def aclose(self) -> None:
        await self._episodes.aclose()


def open_tool_parser(config: Config, tokenizer: Any, server_url: str) -> ParseCalls | None:
    """Return the parser of the model's tool calls, or None if the format is unknown and the run needs no parser.

    Raises:
        ConfigError: task.tools or rollout.tool_parser is set, but no parser fits.
    """
    url = server_url if config.rollout.engine_entry.parses_tool_calls else ""
    template, headers = tokenizer.chat_template or "", authorization(config.network)
    try:
        return open_parser(config.rollout.tool_parser, template, url, headers)
    except ConfigError:
        if config.task.tools or config.rollout.tool_parser:
            raise
        return None


@dataclass(slots=True)
class _Waiting:
    """A reply that a session waits for."""

    sample: int
    turn: int
    future: asyncio.Future[SampledReply]


class GroupSampler:
    """Samples the replies of one group's sessions from the engine.

    Sessions that ask for replies to equal conversations at the same time share one request. So with equal first
    messages the first turn of a group is a single request, like the answers to a question. Every other reply is a
    separate request.

    Args:
        request: the group's request. Requests for replies are copies with other prompt tokens, n, max_tokens and seed.
    """

    def __init__(self, generate: GenerateReplies, request: GenerationRequest) -> None:
        self._generate = generate
        self._request = request
        self._collected: dict[tuple[tuple[int, ...], int], list[_Waiting]] = {}
        """Replies asked for in this iteration of the event loop, by (conversation, max_tokens)."""
        self._running: set[asyncio.Task[None]] = set()

    def of_sample(self, sample: int) -> Generate:
        """Return the function that samples the replies of the group's episode number `sample`."""
        return partial(self._reply, sample, itertools.count())

    async def _reply(self, sample: int, turns: Iterator[int], tokens: list[int], max_tokens: int) -> SampledReply:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(sample, next(turns), loop.create_future())
        if not self._collected:
            loop.call_soon(self._send_collected)
        self._collected.setdefault((tuple(tokens), max_tokens), []).append(waiting)
        return await waiting.future

    def _send_collected(self) -> None:
        collected, self._collected = self._collected, {}
        for (tokens, max_tokens), waiting in collected.items():
            task = asyncio.get_running_loop().create_task(self._send(list(tokens), max_tokens, waiting))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            for one in waiting:
                one.future.add_done_callback(partial(_cancel_if_unwanted, task, waiting))

    async def _send(self, tokens: list[int], max_tokens: int, waiting: list[_Waiting]) -> None:
        prompt = replace(self._request.prompt, tokens=np.array(tokens, np.int32))
        request = replace(
            self._request, prompt=prompt, n=len(waiting), max_tokens=max_tokens, seed=self._seed(prompt, waiting)
        )
        try:
            replies = await all_replies(self._generate, request)
        except asyncio.CancelledError:
            for one in waiting:
                one.future.cancel()
            raise
        except Exception as error:  # each session raises it
            for one in waiting:
                if not one.future.done():
                    one.future.set_exception(error)
            return
        for one, reply in zip(waiting, replies, strict=True):
            if not one.future.done():
                one.future.set_result(reply)

    def _seed(self, prompt: Prompt, waiting: list[_Waiting]) -> int:
        """Return the seed of a request: the group's seed for the first turn of all episodes, else a derived seed.

        The engine draws the random numbers of a reply from (seed, prompt, number of the reply in its request). So
        replies of different episodes or turns need different seeds.
        """
        replies = [(reply.sample, reply.turn) for reply in waiting]
        if replies == [(sample, 0) for sample in range(self._request.n)]:
            return self._request.seed
        source = np.random.SeedSequence((self._request.seed, *replies[0], 1))
        return int(source.generate_state(1, np.uint64)[0]) >> 1


def _cancel_if_unwanted(task: asyncio.Task[None], waiting: list[_Waiting], _: object) -> None:
    """Cancel the request `task` if every caller that waits for one of its replies was cancelled."""
    if all(reply.future.cancelled() for reply in waiting):
        task.cancel()
