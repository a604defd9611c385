"""Plays episodes with an agent: code that talks to an OpenAI endpoint and returns a reward. `task.agent` names it.

    async def solve(question: Question, base_url: str, api_key: str) -> float

The agent needs to know nothing of training. A `def` runs in a thread of its own; an `async def` must not block. It must
end when it is cancelled, or when its requests get status 410.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from async_rl.base.errors import AsyncRLError
from rollout_server.episodes.agents.agent_process import AgentProcess
from rollout_server.episodes.agents.openai_endpoint import OpenAIEndpoint, OpenSession
from rollout_server.episodes.conversation.session import Session
from rollout_server.episodes.episode import (
    Attempt,
    Episode,
    EpisodeFailedError,
    EpisodeLimits,
    ModelAtFaultError,
    finite,
    first_success,
)
from rollout_server.episodes.user_code.faults import Fault
from rollout_server.episodes.user_code.time_limits import CANCEL_S, OverdueError, in_thread
from rollout_server.question import Question

Agent = Callable[..., Any]
"""Called as agent(question, base_url=..., api_key=...); returns the reward of the episode, or an awaitable of it."""


class AgentRunner:
    """Plays a worker's episodes by calls of its agent, many at once. Each episode has a session and a key of its own.

    Args:
        max_concurrent_agents: how many calls of the agent run at once; further episodes wait.
        playing: entered while an episode is played, for the worker's status; not while it waits for a place.
    """

    def __init__(
        self, agent: Agent, endpoint: OpenAIEndpoint, limits: EpisodeLimits, max_concurrent_agents: int,
        playing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._agent = agent
        self._endpoint = endpoint
        self._limits = limits
        self._places = asyncio.Semaphore(max_concurrent_agents)
        self._playing = playing

    async def run(self, question: Question, open_session: Callable[[], Session]) -> Episode:
        """Return the episode of the agent's work on a question; if it fails, play once more with a fresh session.

        Raises:
            AsyncRLError: the engine failed, or the process of the agent can't start.
        """
        async with self._places:
            with self._playing():
                return await first_success(partial(self._attempt, question, open_session))

    async def _attempt(self, question: Question, open_session: Callable[[], Session]) -> Episode:
        if isinstance(self._agent, AgentProcess):
            await self._agent.ready()  # the time limits of an attempt count from here
        attempt = _AgentAttempt(self._limits, open_session(), self._endpoint, self._agent, question)
        episode = await attempt.run()
        return episode.with_reward(attempt.reward) if episode.rows else episode


class _AgentAttempt(Attempt):
    """One attempt to play an episode with an agent."""

    def __init__(
        self, limits: EpisodeLimits, session: Session, endpoint: OpenAIEndpoint, agent: Agent, question: Question
    ) -> None:
        super().__init__(limits, session)
        self._endpoint = endpoint
        self._agent = agent
        self._question = question
        self._opened = endpoint.open(session)
        self.reward = 0.0
        """The reward that the agent returned; 0 if it did not get that far."""

    async def play(self) -> None:
        """Run the agent to its end, and keep its reward.

        Raises:
            OverdueError: the agent asked for no reply within timeouts.turn_s.
            EpisodeOver: the agent failed after it was told that no turn or no room is left.
            ModelAtFaultError: the agent raised after a reply of the model, which may have caused such an error.
            EpisodeFailedError: the agent failed in another way.
            AsyncRLError: the engine failed.
        """
        opened = self._opened
        call = partial(_called, self._agent, self._question, opened)
        running = asyncio.create_task(self.foreign.call(call, self.limits.episode_s, "the agent"))
        try:
            await self._wait(running)
            self.reward = finite(running.result(), "the reward that the agent returns")
        except (OverdueError, EpisodeFailedError, AsyncRLError):
            raise
        except Exception as error:
            if isinstance(opened.error, AsyncRLError):
                raise opened.error from error
            if opened.over is not None:
                raise opened.over from error
            fault = Fault.of(error)
            may_be_models = opened.session.num_turns and not opened.error and not fault.is_outside
            kind = ModelAtFaultError if may_be_models else EpisodeFailedError
            raise kind(f"the agent raised {fault}", fault) from error
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait((running,), timeout=CANCEL_S)  # this cancels the agent, and does not wait for it
        if isinstance(opened.error, AsyncRLError):
            raise opened.error
        if opened.session.num_turns == 0 and opened.refused is not None:
            raise EpisodeFailedError(f"the agent got no reply of the policy to its first request: {opened.refused}")
        if opened.session.num_turns == 0:
            raise EpisodeFailedError("the agent returned without a reply of the policy: it must use its base_url")

    async def close(self) -> None:
        self._endpoint.end(self._opened.key)
        self.tool_counts.calls = self.session.counts.tool_calls

    async def _wait(self, running: asyncio.Task[Any]) -> None:
        """Wait until the agent has ended.

        Raises:
            OverdueError: no request of the agent was running for timeouts.turn_s.
        """
        opened, limit_s = self._opened, self.limits.turn_s
        while not running.done():
            idle_s = 0.0 if opened.num_running else time.monotonic() - opened.idle_since_s
            if idle_s >= limit_s:
                raise OverdueError(f"the agent asked for no reply within {limit_s:g} s (timeouts.turn_s)")
            await asyncio.wait((running,), timeout=limit_s - idle_s)


async def _called(agent: Agent, question: Question, opened: OpenSession) -> Any:
    call = partial(agent, question, base_url=opened.base_url, api_key=opened.key)
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None)):  # noqa: B004
        return await call()
    result = await in_thread(call)
    return await result if isinstance(result, Awaitable) else result
