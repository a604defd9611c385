"""The loop of one episode: its limits, its end, and what happens if the code of an environment or agent fails.

Whatever that code does (raise, hang, leave tasks behind), its episode ends and the fault is counted. `Attempt` has the
code that environments and agents share. `EnvRunner` plays with an environment, which alternates with the model:

    env.start ──► messages ──► session.reply ──► reply ──► tools, or env.step ──► messages ──► ...
"""

from __future__ import annotations

import asyncio
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from async_rl.base.errors import AsyncRLError, shown
from async_rl.base.types import MAX_METRICS, MAX_NAME_CHARS
from rollout_server.episodes.conversation.chat_messages import Message, plain_messages, tools_text
from rollout_server.episodes.conversation.session import CLOSE_S as SESSION_CLOSE_S
from rollout_server.episodes.conversation.session import EpisodeOver, Session
from rollout_server.episodes.env import Env, Step
from rollout_server.episodes.episode import EPISODE_METRICS, End, Episode, WholeRow
from rollout_server.episodes.tools.tool import Tool, ToolCaller, ToolCounts
from rollout_server.episodes.user_code import CANCEL_S, Fault, ForeignCode, OverdueError

Result = TypeVar("Result")

CLOSE_S = 10.0
"""The time limit of an environment's `close`."""
MAX_ATTEMPTS = 2
"""How often an episode is played if its environment or agent fails. Each attempt has a new session."""
END_S = SESSION_CLOSE_S + CLOSE_S + 4 * CANCEL_S
"""How long an attempt may take to end after its time limit: the waits of `Attempt.run`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """The time limits of an episode."""

    tool_s: float
    """The limit of one tool call."""
    turn_s: float
    """The limit of one call of the environment. For an agent: the limit between a reply and the agent's next request.
    """
    episode_s: float
    """The limit of the whole episode."""
    on_timeout: Literal["zero", "partial", "drop"] = "zero"
    """The reward of an overdue episode: 0 (`zero`) or the rewards of its turns (`partial`). `drop` drops the episode.
    """

    @property
    def longest_s(self) -> float:
        """The longest time that an episode can take, including all its attempts."""
        return MAX_ATTEMPTS * (self.episode_s + END_S)


class EpisodeFailedError(Exception):
    """An environment or an agent raised, or returned something wrong. The episode ends as `failed`.

    Args:
        fault: the exception of the user's code, if there was one.
    """

    end: End = "failed"

    def __init__(self, message: str, fault: Fault | None = None) -> None:
        super().__init__(message)
        self.fault = fault


class ModelAtFaultError(EpisodeFailedError):
    """An agent raised because of the model's reply.

    The episode ends as `error`: it keeps its rows, and its reward is 0.
    """

    end: End = "error"


def finite(value: Any, what: str) -> float:
    """Return a reward or a metric of user code as a float.

    Args:
        what: names the value in error messages.

    Raises:
        EpisodeFailedError: `value` is not a finite number.
    """
    try:
        number = float(value)
    except OverflowError:
        raise EpisodeFailedError(f"{what} must be a finite number, got one beyond the range of a float") from None
    except Exception:  # float runs the code of the value's class
        raise EpisodeFailedError(f"{what} must be a number, got {shown(value)}") from None
    if not math.isfinite(number):
        raise EpisodeFailedError(f"{what} must be a finite number, got {number}")
    return number


async def first_success(attempt: Callable[[], Awaitable[Episode]]) -> Episode:
    """Play an episode, up to MAX_ATTEMPTS times while its environment or agent fails.

    Returns the last attempt's episode.
    """
    num_failed = 0
    while True:
        episode = await attempt()
        num_failed += episode.end == "failed"
        if episode.end != "failed" or num_failed == MAX_ATTEMPTS:
            return replace(episode, metrics={**episode.metrics, "failed": num_failed})


class Attempt(ABC):
    """One attempt to play an episode. A subclass plays it with an environment or an agent.

    Args:
        session: a new session. The attempt closes it.
    """

    def __init__(self, limits: EpisodeLimits, session: Session) -> None:
        self.limits = limits
        self.session = session
        self.foreign = ForeignCode()
        """Runs the code of the environment, its tools or the agent."""
        self.metrics: dict[str, float] = {}
        """The metrics of the environment."""
        self.tool_counts = ToolCounts()

    @abstractmethod
    async def play(self) -> None:
        """Play the episode; return when it is done.

        Raises:
            EpisodeOver, OverdueError, EpisodeFailedError, ModelAtFaultError: the episode ended for another reason.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close the environment, or end the agent's session. Always called, with a time limit."""

    async def run(self) -> Episode:
        """Play within the episode's time limit, close the session and the environment or agent, and return the episode.

        Raises:
            AsyncRLError: the engine failed.
        """
        began_s = asyncio.get_running_loop().time()
        end: End = "done"
        error: tuple[str, str, str] | None = None
        try:
            async with asyncio.timeout(self.limits.episode_s) as limit:
                await self.play()
        except EpisodeOver as over:
            end = "failed" if over.reason == "ended" else over.reason
            error = _described(over)
        except TimeoutError as overdue:
            if not (limit.expired() or isinstance(overdue, OverdueError)):
                raise
            end = "timeout"
            error = _described(
                overdue, f"the episode took longer than {self.limits.episode_s:g} s (timeouts.episode_s)"
            )
        except EpisodeFailedError as failed:
            end, error = failed.end, _described(failed)
        finally:
            num_leaked, close_error = await self._close()
        duration_s = asyncio.get_running_loop().time() - began_s
        said, kind, lines = error or close_error
        return Episode(
            rows=self._rows(end), answer=self.session.last_answer, end=end, error=said, error_kind=f"{end} {kind}",
            traceback=lines, messages=self.session.last_messages,
            metrics={
                **self._metrics(duration_s, num_leaked, end),
                **{f"env/{name}": value for name, value in self.metrics.items()},
            },
        )  # fmt: skip

    async def _close(self) -> tuple[int, tuple[str, str, str]]:
        """Close the session and the environment. Return (number of tasks left over, the error of `close`)."""
        error = ("", "", "")
        await self.session.close()
        await self.foreign.end_cancelled_calls()
        try:
            await self.foreign.call(self.close, CLOSE_S, "the environment's close")
        except Exception as raised:
            fault = Fault.of(raised)
            error = _described(EpisodeFailedError(f"the environment's close raised {fault}", fault))
        return await self.foreign.end_created_tasks(), error

    def _rows(self, end: End) -> tuple[WholeRow, ...]:
        rows = self.session.rows()
        if not rows or end == "failed" or (end == "timeout" and self.limits.on_timeout == "drop"):
            return ()
        if end == "error" or (end == "timeout" and self.limits.on_timeout == "zero"):
            rows = [replace(row, turn_rewards=(0.0,) * len(row.turn_rewards)) for row in rows]
        if end not in ("done", "error"):
            rows[-1] = replace(rows[-1], finish_reason="timeout" if end == "timeout" else "length")
        return tuple(rows)

    def _metrics(self, duration_s: float, num_leaked: int, end: End) -> dict[str, float]:
        session, tools = self.session, self.tool_counts
        values = (
            session.num_turns, tools.calls, tools.failed, tools.tool_s, session.generate_s, duration_s,
            session.num_sampled_tokens, session.num_observed_tokens, tools.timeouts + (end == "timeout"), 0,
            session.counts.rewritten, num_leaked, self.foreign.num_given_up,
        )  # fmt: skip
        return dict(zip(EPISODE_METRICS, values, strict=True))


def _described(error: Exception, default: str = "") -> tuple[str, str, str]:
    """Describe an error: return (its text or `default`, its kind, the traceback of the user's code or "").

    The kind consists of the lines of our traceback, and the class and line of the user's error.
    """
    places = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)]
    fault = error.fault if isinstance(error, EpisodeFailedError) else None
    if fault is None:
        return str(error) or default, " ".join(places), ""
    return str(error), f"{' '.join(places)} {fault.name} {fault.at}", fault.traceback


class EnvRunner:
    """Plays a worker's episodes with environments, many at the same time.

    Args:
        max_concurrent_calls: how many calls of tools and environments may run simultaneously, over all episodes.
        playing: makes a context that shows the episode in the worker's status, entered while it is played.
    """

    def __init__(
        self, limits: EpisodeLimits, max_concurrent_calls: int,
        playing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._limits = limits
        self._playing = playing
        self._places = asyncio.Semaphore(max_concurrent_calls)

    async def run(self, open_env: Callable[[], Env], open_session: Callable[[], Session]) -> Episode:
        """Play an episode and return it. If the environment fails, play it once more with a new environment.

        Raises:
            AsyncRLError: the engine failed.
        """
        with self._playing():
            return await first_success(lambda: _EnvAttempt(self._limits, open_session(), self._places, open_env).run())


class _EnvAttempt(Attempt):
    """One attempt to play an episode with an environment."""

    def __init__(
        self, limits: EpisodeLimits, session: Session, places: asyncio.Semaphore, open_env: Callable[[], Env]
    ) -> None:
        super().__init__(limits, session)
        self._tools = ToolCaller((), limits.tool_s, places, self.foreign, self.tool_counts)
        self._places = places
        self._open_env = open_env
        self._env: Env | None = None

    async def play(self) -> None:
        """Alternate between the environment and the model until the environment is done."""
        env = self._open()
        messages = _messages(await self._call(env.start, "the environment's start"))
        schemas = self._tools.schemas()
        while True:
            try:
                reply = await self.session.reply(messages, schemas)
            except AsyncRLError:  # some are ValueErrors: of an oracle that raised
                raise
            except ValueError as error:
                raise EpisodeFailedError(f"the environment's messages can't be shown to the model: {error}") from error
            said, calls = reply.message, reply.message.get("tool_calls", [])
            if (calls or reply.call_errors) and self._tools.can_answer(calls):
                messages += [said, *await self._tools.answer(calls, reply.call_errors)]
                continue
            self.tool_counts.calls += len(calls) + len(reply.call_errors)
            step = await self._call(partial(_step, env, said), "the environment's step")
            self.session.add_reward(reply.turn, step.reward)
            self.metrics.update(step.metrics)
            if len(self.metrics) > MAX_METRICS:
                names = [repr(name) for name in self.metrics]
                raise EpisodeFailedError(
                    f"an episode may log metrics of at most {MAX_METRICS} names, got {len(names)}: "
                    f"{', '.join(names[:3])}, ..., {names[-1]}"
                )
            if step.done:
                return
            messages += [said, *_messages(step.messages)]

    def _open(self) -> Env:
        try:
            env = self._env = self._open_env()
            self._tools.tools = tuple(map(_tool, env.tools))
        except (AsyncRLError, EpisodeFailedError):
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            fault = Fault.of(error)
            raise EpisodeFailedError(f"the environment can't be created: {fault}", fault) from error
        return env

    async def _call(self, method: Callable[[], Awaitable[Result]], what: str) -> Result:
        """Call a method of the environment and return its result. Waits first while max_concurrent_calls are running.

        Args:
            what: names the call in error messages.

        Raises:
            OverdueError: the method took longer than timeouts.turn_s.
            EpisodeFailedError: the method raised.
        """
        try:
            async with self._places:
                return await self.foreign.call(method, self.limits.turn_s, what)
        except (OverdueError, AsyncRLError, EpisodeFailedError):
            raise
        except Exception as error:
            fault = Fault.of(error)
            raise EpisodeFailedError(f"{what} raised {fault}", fault) from error

    async def close(self) -> None:
        if self._env is not None:
            await self._env.close()


def _tool(found: Any) -> Tool:
    """Return an entry of an environment's `tools` as a Tool.

    Raises:
        ConfigError: the entry is a function that can't be described to the model.
        EpisodeFailedError: the entry is neither a function nor a Tool, or a Tool with a malformed schema.
    """
    if not isinstance(found, Tool):
        if isinstance(found, type) or not callable(found):
            raise EpisodeFailedError(
                f"the environment's tools must be functions or Tools, got {shown(found)}. Tool(schema) of "
                "rollout_server.episodes.tools.tool is a tool whose calls the environment's step gets; of an object, "
                "list the methods"
            )
        return Tool.from_function(found)
    try:
        tools_text([found.schema])
        if isinstance(found.schema["function"]["name"], str):
            return found
    except (KeyError, TypeError, ValueError, RecursionError):
        pass
    raise EpisodeFailedError(
        'the schema of a Tool must be {"type": "function", "function": {"name": ..., "parameters": ...}} as JSON has '
        f"it, got {shown(found.schema)}"
    )


def _messages(messages: Any) -> list[Message]:
    """Check the messages of an environment, and return them with each content as plain text.

    Raises:
        EpisodeFailedError: they are not a list of messages with a role and text.
    """
    if isinstance(messages, str | Mapping):
        raise EpisodeFailedError(
            f"the environment's messages must be a list of messages, got {messages!r:.200}. One message is "
            "[user('its text')], with `user` of rollout_server.episodes.conversation.chat_messages"
        )
    try:
        return plain_messages(messages)
    except Exception as error:  # a generator is the environment's code
        raise EpisodeFailedError(f"the environment's messages can't be shown to the model: {error}") from error


async def _step(env: Env, reply: Message) -> Step:
    """Call the environment's `step`, check the result, and return it with its numbers as floats.

    The check may raise anything, because the classes of the result's values are user code too.

    Raises:
        EpisodeFailedError: the result is no Step, has unusable numbers or names, or has nothing to reply to.
    """
    step = await env.step(reply)
    if not isinstance(step, Step):
        raise EpisodeFailedError(f"the environment's step must return a Step, got {step!r:.200}")
    if not step.done and not step.messages:
        raise EpisodeFailedError("the environment's Step must hold messages for the model, or be done, got neither")
    if not isinstance(step.metrics, Mapping):
        allowed = "a mapping of names to numbers"
        raise EpisodeFailedError(f"the metrics of a step must be {allowed}, got {step.metrics!r:.200}")
    for name in step.metrics:
        if not isinstance(name, str) or len(name) > MAX_NAME_CHARS or not name.isprintable():
            allowed = f"printable text of at most {MAX_NAME_CHARS} characters"
            raise EpisodeFailedError(f"the name of a metric of a step must be {allowed}, got {name!r:.200}")
    metrics = {name: finite(value, f"the metric {name} of a step") for name, value in step.metrics.items()}
    return replace(step, reward=finite(step.reward, "the reward of a step"), metrics=metrics)
