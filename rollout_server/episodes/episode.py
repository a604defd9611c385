"""Plays an episode: the environment and the model speak in turn until one of them, or a limit, ends it.

    env.start ──► messages ──► session.reply ──► reply ──► tools, or env.step ──► messages ──► ...

Whatever an environment or a tool does (raise, hang, leave tasks behind), its episode ends and the fault is counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, TypeVar

from async_rl.errors import AsyncRLError, raised_at
from rollout_server.episodes.env import Env, Step
from rollout_server.episodes.rows import Row
from rollout_server.episodes.session import EpisodeOver, Session
from rollout_server.episodes.time_limits import ForeignCode, OverdueError
from rollout_server.episodes.tools import ToolCaller

CLOSE_S = 10.0
"""The time limit of an environment's `close`."""
MAX_ATTEMPTS = 2
"""An episode whose environment fails is played once more, with a fresh environment and a fresh session."""

End = Literal["done", "length", "turns", "timeout", "failed"]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The time limits of an episode."""

    tool_s: float
    """The time limit of one tool call."""
    turn_s: float
    """The time limit of one call of the environment; for an agent, of the time between a reply and its next request."""
    episode_s: float
    """The time limit of the whole episode."""
    on_timeout: Literal["zero", "partial", "drop"] = "zero"
    """The reward of an episode that ran out of time: 0, that of its turns so far, or none: the episode is dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """An episode that has ended."""

    rows: tuple[Row, ...]
    """Its trainable rows. None, if it failed or is dropped."""
    answer: str
    """The content of the model's last reply."""
    end: End
    """done: the environment ended it. length, turns: no room, or no turn was left. timeout, failed: see `error`."""
    error: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the episode, with keys of `EPISODE_METRICS`, and those of the environment as `env/<name>`."""

    @property
    def reward(self) -> float:
        """The sum of the rewards of all turns."""
        return sum(reward for row in self.rows for reward in row.turn_rewards)

    def with_reward(self, reward: float) -> Episode:
        """Return the episode with a reward added to its last turn."""
        *rows, last = self.rows
        *rewards, last_reward = last.turn_rewards
        last = replace(last, turn_rewards=(*rewards, last_reward + reward))
        return replace(self, rows=(*rows, last))


EPISODE_METRICS = (
    "turns", "tool_calls", "failed_tool_calls", "tool_s", "generate_s", "duration_s", "sampled_tokens",
    "observed_tokens", "timeouts", "failed", "rewritten", "leaked_tasks", "given_up_calls",
)  # fmt: skip
"""The metrics that every episode has. `timeouts` counts overdue calls and an overdue episode, `failed` attempts."""


class EnvFailedError(Exception):
    """An environment raised, or returned something wrong. Its message says what and where."""


class EpisodeRunner:
    """Plays episodes, many at once. All of them share the limit on concurrent calls.

    Args:
        max_concurrent_calls: how many calls of tools and environments run at once.
    """

    def __init__(self, limits: EpisodeLimits, max_concurrent_calls: int) -> None:
        self._limits = limits
        self._places = asyncio.Semaphore(max_concurrent_calls)

    async def run(self, open_env: Callable[[], Env], open_session: Callable[[], Session]) -> Episode:
        """Play an episode to its end; if the environment fails, play it once more.

        Raises:
            AsyncRLError: the engine failed, or the reward did.
        """
        num_failed = 0
        while True:
            episode = await _Play(self._limits, self._places, open_session()).run(open_env)
            num_failed += episode.end == "failed"
            if episode.end != "failed" or num_failed == MAX_ATTEMPTS:
                return replace(episode, metrics={**episode.metrics, "failed": num_failed})


class _Play:
    """One attempt to play an episode."""

    def __init__(self, limits: EpisodeLimits, places: asyncio.Semaphore, session: Session) -> None:
        self._limits = limits
        self._places = places
        self._session = session
        self._foreign = ForeignCode()
        self._tools = ToolCaller((), limits.tool_s, places, self._foreign)
        self._env_metrics: dict[str, float] = {}
        self._answer = ""
        self._num_timeouts = 0

    async def run(self, open_env: Callable[[], Env]) -> Episode:
        """Play the episode, close the environment and the session, and return what was played."""
        began_s = asyncio.get_running_loop().time()
        env: Env | None = None
        end: End = "done"
        error = ""
        try:
            async with asyncio.timeout(self._limits.episode_s) as limit:
                env = self._open(open_env)
                await self._play(env)
        except EpisodeOver as over:
            assert over.reason != "ended", "nobody else closes this session"
            end = over.reason
        except TimeoutError as overdue:
            if not (limit.expired() or isinstance(overdue, OverdueError)):
                raise
            end = "timeout"
            error = str(overdue) or f"the episode took longer than {self._limits.episode_s:g} s (timeouts.episode_s)"
            self._num_timeouts += 1
        except EnvFailedError as failed:
            end, error = "failed", str(failed)
        finally:
            num_leaked, close_error = await self._close(env)
        if close_error and end == "done":
            error = close_error  # what was played is whole
        metrics = self._metrics(asyncio.get_running_loop().time() - began_s, num_leaked)
        return Episode(
            rows=self._rows(end), answer=self._answer, end=end, error=error,
            metrics={**metrics, **{f"env/{name}": value for name, value in self._env_metrics.items()}},
        )  # fmt: skip

    def _open(self, open_env: Callable[[], Env]) -> Env:
        try:
            env = open_env()
            self._tools.tools = tuple(env.tools)
        except AsyncRLError:
            raise
        except Exception as error:
            raise EnvFailedError(
                f"the environment can't be created: {type(error).__name__}: {error}, at {raised_at(error)}"
            ) from error
        return env

    async def _play(self, env: Env) -> None:
        """Let the environment and the model speak in turn until the environment is done."""
        messages = list(await self._call(env.start, "the environment's start"))
        schemas = self._tools.schemas()
        while True:
            try:
                reply = await self._session.reply(messages, schemas)
            except ValueError as error:
                raise EnvFailedError(f"the environment's messages can't be shown to the model: {error}") from error
            said, calls = reply.message, reply.message.get("tool_calls", [])
            self._answer = said["content"]
            if (calls or reply.call_errors) and self._tools.can_answer(calls):
                messages += [said, *await self._tools.answer(calls, reply.call_errors)]
                continue
            step = _checked(await self._call(partial(env.step, said), "the environment's step"))
            self._session.add_reward(reply.turn, step.reward)
            self._env_metrics.update(step.metrics)
            if step.done:
                return
            messages += [said, *step.messages]

    async def _call(self, method: Callable[[], Awaitable[Result]], what: str) -> Result:
        """Run a method of the environment, with a place and a time limit.

        Raises:
            OverdueError: it took longer than timeouts.turn_s.
            EnvFailedError: it raised.
        """
        try:
            async with self._places:
                return await self._foreign.call(method, self._limits.turn_s, what)
        except (OverdueError, AsyncRLError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise EnvFailedError(f"{what} raised {type(error).__name__}: {error}, at {raised_at(error)}") from error

    async def _close(self, env: Env | None) -> tuple[int, str]:
        """Close the session and the environment; return the number of tasks that it left behind, and an error."""
        error = ""
        await self._session.close()
        await self._foreign.end_cancelled_calls()
        if env is not None:
            try:
                await self._foreign.call(env.close, CLOSE_S, "the environment's close")
            except Exception as raised:
                error = f"the environment's close raised {type(raised).__name__}: {raised}"
        return await self._foreign.end_created_tasks(), error

    def _rows(self, end: End) -> tuple[Row, ...]:
        rows = self._session.rows()
        if not rows or end == "failed" or (end == "timeout" and self._limits.on_timeout == "drop"):
            return ()
        if end == "timeout" and self._limits.on_timeout == "zero":
            rows = [replace(row, turn_rewards=(0.0,) * len(row.turn_rewards)) for row in rows]
        if end != "done":
            rows[-1] = replace(rows[-1], finish_reason="timeout" if end == "timeout" else "length")
        return tuple(rows)

    def _metrics(self, duration_s: float, num_leaked: int) -> dict[str, float]:
        session, tools = self._session, self._tools.counts
        values = (
            session.num_turns, tools.calls, tools.failed, tools.tool_s, session.counts.generate_s, duration_s,
            session.num_sampled_tokens, session.num_observed_tokens, self._num_timeouts + tools.timeouts, 0,
            session.counts.rewritten, num_leaked, self._foreign.num_given_up,
        )  # fmt: skip
        return dict(zip(EPISODE_METRICS, values, strict=True))


def _checked(step: Step) -> Step:
    """Return the step if it is valid.

    Raises:
        EnvFailedError: it is none, its reward is no finite number, or the model has nothing to reply to.
    """
    if not isinstance(step, Step):
        raise EnvFailedError(f"the environment's step must return a Step, got {step!r:.200}")
    if isinstance(step.reward, bool) or not isinstance(step.reward, int | float) or not math.isfinite(step.reward):
        raise EnvFailedError(f"the reward of a step must be a finite number, got {step.reward!r}")
    if not step.done and not step.messages:
        raise EnvFailedError("a step must hold messages for the model, or be done, got neither")
    return step
