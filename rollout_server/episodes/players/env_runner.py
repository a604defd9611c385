"""Plays episodes with an environment: it and the model speak in turn until one of them, or a limit, ends it.

env.start ──► messages ──► session.reply ──► reply ──► tools, or env.step ──► messages ──► ...
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from async_rl.base.errors import AsyncRLError, shown
from async_rl.base.field_kinds import MAX_METRICS, MAX_NAME_CHARS
from rollout_server.episodes.conversation.messages import Message, plain_messages, tools_text
from rollout_server.episodes.conversation.session import Session
from rollout_server.episodes.env import Env, Step
from rollout_server.episodes.episode import Attempt, Episode, EpisodeFailedError, EpisodeLimits, finite, first_success
from rollout_server.episodes.tools.tool import Tool, ToolCaller
from rollout_server.episodes.user_code.faults import Fault
from rollout_server.episodes.user_code.time_limits import OverdueError

Result = TypeVar("Result")


class EnvRunner:
    """Plays a worker's episodes with environments, many at once. They share the limit on concurrent calls.

    Args:
        max_concurrent_calls: how many calls of tools and environments run at once.
        playing: entered while an episode is played, for the worker's status.
    """

    def __init__(
        self, limits: EpisodeLimits, max_concurrent_calls: int,
        playing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._limits = limits
        self._playing = playing
        self._places = asyncio.Semaphore(max_concurrent_calls)

    async def run(self, open_env: Callable[[], Env], open_session: Callable[[], Session]) -> Episode:
        """Return an episode, played to its end. If the environment fails, it is played once more with a fresh one.

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
        """Let the environment and the model speak in turn until the environment is done."""
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
            step = _checked(await self._call(partial(env.step, said), "the environment's step"))
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
        """Return the result of a method of the environment, called once fewer than max_concurrent_calls others run.

        Raises:
            OverdueError: the method took longer than timeouts.turn_s.
            EpisodeFailedError: the method raised.
        """
        try:
            async with self._places:
                return await self.foreign.call(partial(_awaited, method, what), self.limits.turn_s, what)
        except (OverdueError, AsyncRLError, EpisodeFailedError):
            raise
        except Exception as error:
            fault = Fault.of(error)
            raise EpisodeFailedError(f"{what} raised {fault}", fault) from error

    async def close(self) -> None:
        if self._env is not None:
            await _awaited(self._env.close, "the environment's close")


async def _awaited(method: Callable[[], Awaitable[Result]], what: str) -> Result:
    """Return the result of a method of an environment.

    Raises:
        EpisodeFailedError: it is a plain `def`.
    """
    result = method()
    if not inspect.isawaitable(result):
        raise EpisodeFailedError(f"{what} must be an `async def`, got a `def` that returned {result!r:.200}")
    return await result


def _tool(found: Any) -> Tool:
    """Return a tool of an environment, made of the function `found` if it is one.

    Raises:
        ConfigError: the function can't be described to the model.
        EpisodeFailedError: it is neither a function nor a Tool, or a Tool whose schema can't be shown to the model.
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
    """Return the messages of an environment, with all content as plain text.

    Raises:
        EpisodeFailedError: `messages` are no messages with a role and text.
    """
    if isinstance(messages, str | Mapping):
        raise EpisodeFailedError(
            f"the environment's messages must be a list of messages, got {messages!r:.200}. One message is "
            "[user('its text')], with `user` of rollout_server.episodes.conversation.messages"
        )
    try:
        return plain_messages(messages)
    except Exception as error:  # a generator is the environment's code
        raise EpisodeFailedError(f"the environment's messages can't be shown to the model: {error}") from error


def _checked(step: Step) -> Step:
    """Return the step, with its numbers as floats.

    Raises:
        EpisodeFailedError: it is no Step, one of its numbers or names can't be used, or the model has nothing to reply
            to.
    """
    try:
        return _with_floats(step)
    except EpisodeFailedError:
        raise
    except Exception as error:  # the classes of its values are the environment's: an array is neither true nor false
        fault = Fault.of(error)
        raise EpisodeFailedError(f"the environment's Step can't be read: {fault}", fault) from error


def _with_floats(step: Step) -> Step:
    """Return the step as `_checked` does; it raises whatever the code of the step's values does."""
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
