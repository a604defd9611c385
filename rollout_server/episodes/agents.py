"""Plays episodes with an agent: code that talks to an OpenAI endpoint and returns a reward. `task.agent` names it.

    async def solve(question: Question, base_url: str, api_key: str) -> float

The agent need not know that it is trained. A `def` runs in a thread of its own, an `async def` must not block. The
agent must end when it is cancelled, or when its requests get status 410. With `task.agent_python` it runs in a separate
process, whose Python environment may have packages that are incompatible with ours.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Context
from functools import partial
from pathlib import Path
from typing import Any

from async_rl.base.config import TaskConfig
from async_rl.base.errors import AsyncRLError, ConfigError, ProcessDiedError, WaitTimeoutError
from async_rl.base.seams import import_object
from rollout_server.episodes import agent_host
from rollout_server.episodes.conversation.session import Session
from rollout_server.episodes.endpoint.server import AgentEndpoint
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import (
    Attempt,
    EpisodeFailedError,
    EpisodeLimits,
    ModelAtFaultError,
    finite,
    first_success,
)
from rollout_server.episodes.user_code import CANCEL_S, AgentRaisedError, Fault, OverdueError, called
from rollout_server.question import Question

MAX_DEATHS = 3
"""The run ends when an agent's process has died this many times without an answer in between."""
START_S = 120.0
"""How long the process may take to import the agent."""
END_S = 5.0
"""How long the process may take to end after its standard input was closed."""
_MAX_LINE_BYTES = 2**24

Agent = Callable[..., Any]
"""Called as agent(question, base_url=..., api_key=...). Returns the reward of the episode, directly or as an awaitable.
"""


def open_agents(
    task: TaskConfig, log_file: Path, limits: EpisodeLimits, playing: Callable[[], AbstractContextManager[None]]
) -> AgentRunner:
    """Return the runner of `task.agent`. Its endpoint and the agent's process start with the first episode.

    Args:
        log_file: where a separate process of the agent writes its output.
        playing: see AgentRunner.

    Raises:
        ConfigError: the agent can't be imported or called, or task.agent_python can't be executed.
    """
    if not task.agent_python:
        agent: Agent = load_agent(task.agent)
    elif os.access(task.agent_python, os.X_OK):
        agent = AgentProcess(task.agent, log_file, task.agent_python)
    else:
        raise ConfigError(
            f"task.agent_python must be a Python program, got {task.agent_python}: there is no such file, or "
            "it can't be run. Make the agent's environment first: python -m venv"
        )
    return AgentRunner(agent, AgentEndpoint(), limits, task.max_concurrent_calls, playing)


def load_agent(name: str) -> Agent:
    """Import the agent `name`, a `module:name`, and check its arguments.

    Raises:
        ConfigError: `name` can't be imported, or can't be called as agent(question, base_url=..., api_key=...).
    """
    found = import_object(name, "task.agent")
    try:
        inspect.signature(found).bind(None, base_url="", api_key="")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"task.agent {name!r} must be a function (question, base_url, api_key) that returns a reward: {error}"
        ) from None
    agent: Agent = found
    return agent


class AgentRunner:
    """Plays a worker's episodes by calling its agent, many at the same time.

    Each episode has its own session and API key.

    Args:
        max_concurrent_agents: how many calls of the agent may run simultaneously. Further episodes wait.
        playing: makes a context that shows the episode in the worker's status, entered once the call may run.
    """

    def __init__(
        self, agent: Agent, endpoint: AgentEndpoint, limits: EpisodeLimits, max_concurrent_agents: int,
        playing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._agent = agent
        self.endpoint = endpoint
        self._limits = limits
        self._places = asyncio.Semaphore(max_concurrent_agents)
        self._playing = playing

    async def run(self, question: Question, open_session: Callable[[], Session]) -> Episode:
        """Play an episode: call the agent with a question. If it fails, play once more with a new session.

        Raises:
            AsyncRLError: the engine failed, or the process of the agent can't start.
        """
        await self.endpoint.start()
        async with self._places:
            with self._playing():
                return await first_success(partial(self._attempt, question, open_session))

    async def _attempt(self, question: Question, open_session: Callable[[], Session]) -> Episode:
        if isinstance(self._agent, AgentProcess):
            await self._agent.started()  # the time limits of an attempt count from here
        attempt = _AgentAttempt(self._limits, open_session(), self.endpoint, self._agent, question)
        episode = await attempt.run()
        return episode.with_reward(attempt.reward) if episode.rows else episode

    async def aclose(self) -> None:
        """Stop the endpoint and the agent's process, if they were started."""
        await self.endpoint.aclose()
        if isinstance(self._agent, AgentProcess):
            await self._agent.aclose()


class _AgentAttempt(Attempt):
    """One attempt to play an episode with an agent."""

    def __init__(
        self, limits: EpisodeLimits, session: Session, endpoint: AgentEndpoint, agent: Agent, question: Question
    ) -> None:
        super().__init__(limits, session)
        self._endpoint = endpoint
        self._agent = agent
        self._question = question
        self._opened = endpoint.open(session)
        self.reward = 0.0
        """The reward that the agent returned, or 0 if it did not return."""

    async def play(self) -> None:
        """Call the agent, wait until it returns, and record its reward.

        Raises:
            OverdueError: the agent asked for no reply within timeouts.turn_s.
            EpisodeOver: the agent failed after a request was refused because no turn or no room was left.
            ModelAtFaultError: the agent raised after a reply of the model, which may have caused the error.
            EpisodeFailedError: the agent failed in another way.
            AsyncRLError: the engine failed.
        """
        opened = self._opened
        call = partial(called, self._agent, self._question, base_url=opened.base_url, api_key=opened.key)
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
        """Wait until the call of the agent has ended.

        Raises:
            OverdueError: no request of the agent was running for timeouts.turn_s.
        """
        opened, limit_s = self._opened, self.limits.turn_s
        while not running.done():
            idle_s = 0.0 if opened.num_running else time.monotonic() - opened.idle_since_s
            if idle_s >= limit_s:
                raise OverdueError(f"the agent asked for no reply within {limit_s:g} s (timeouts.turn_s)")
            await asyncio.wait((running,), timeout=limit_s - idle_s)


class AgentProcess:
    """An agent in a separate process, which starts with the first call. If it dies, the next call starts another.

    Args:
        name: the agent, as `module:name`. Only the process imports it.
        log_file: where the process writes the agent's output.
        python: the interpreter of the agent's own environment. Empty: the interpreter of this process.
    """

    def __init__(self, name: str, log_file: Path, python: str = "") -> None:
        self._name = name
        self._python = python or sys.executable
        self._log_file = log_file
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        """The task that starts the process and returns it. It goes on if the episode that created it is cancelled."""
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[asyncio.subprocess.Process, asyncio.Future[float]]] = {}
        self._num_deaths = 0

    async def started(self) -> asyncio.subprocess.Process:
        """Return the process, once it has imported the agent; start one if none runs.

        Raises:
            ProcessDiedError: the process can't start, or died MAX_DEATHS times without an answer in between.
            WaitTimeoutError: the process did not import the agent within START_S.
        """
        if self._starting is None or (self._starting.done() and _has_ended(self._starting)):
            if self._num_deaths >= MAX_DEATHS:
                raise ProcessDiedError(
                    f"the process of the agent {self._name} died {MAX_DEATHS} times without an answer in between. The "
                    f"end of its log {self._log_file}:\n{_tail(self._log_file)}"
                )
            self._starting = asyncio.create_task(self._start(), name=f"start of {self._name}", context=Context())
        return await asyncio.shield(self._starting)

    async def __call__(self, question: Question, base_url: str, api_key: str) -> float:
        """Call the agent with a question, and return its reward. Cancelling this call cancels the agent's call too.

        Raises:
            EpisodeFailedError: the process died meanwhile, or the agent returned no number.
            AgentRaisedError: the agent raised.
            ProcessDiedError, WaitTimeoutError: the process can't start; see `started`.
        """
        process = await self.started()
        assert process.stdin is not None
        number = next(self._numbers)
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._calls[number] = (process, future)
        body = {"call": number, "question": dataclasses.asdict(question), "base_url": base_url, "api_key": api_key}
        try:
            process.stdin.write(json.dumps(body, default=str).encode() + b"\n")
            return await future
        except asyncio.CancelledError:
            with suppress(OSError, RuntimeError):  # the process has died
                process.stdin.write(json.dumps({"cancel": number}).encode() + b"\n")
            raise
        finally:
            del self._calls[number]

    async def aclose(self) -> None:
        """End the process. If it does not end by itself within END_S, kill it."""
        if self._starting is None:
            return
        with suppress(ProcessDiedError, WaitTimeoutError):
            process = await self._starting
            assert process.stdin is not None
            process.stdin.close()
            try:
                await _wait_for_end(process)
            except TimeoutError:
                process.kill()
                await _wait_for_end(process)
        if self._reading is not None:
            self._reading.cancel()

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
            with self._log_file.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    self._python, str(agent_host.__file__), self._name, stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE, stderr=log, limit=_MAX_LINE_BYTES,
                )  # fmt: skip
        except OSError as error:
            raise ProcessDiedError(
                f"the process of the agent {self._name} can't start with the Python {self._python} (task.agent_python) "
                f"and the log {self._log_file}: {error}"
            ) from error
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_S):
                ready = await process.stdout.readline()
        except TimeoutError:
            process.kill()
            raise WaitTimeoutError(
                f"the agent {self._name} waited {START_S:g} s for its process to import it; log: {self._log_file}"
            ) from None
        if not ready:
            await _wait_for_end(process)
            raise ProcessDiedError(
                f"the process of the agent {self._name} can't start. The end of its log {self._log_file}:\n"
                f"{_tail(self._log_file)}"
            )
        self._reading = asyncio.create_task(self._read(process), name=f"replies of {self._name}")
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Read replies from the process until it ends, and hand each to its call. Then fail the calls without a reply.

        A process that writes anything but replies is killed: its later replies could not be trusted or even read.
        """
        assert process.stdout is not None
        reason = ""
        try:
            while line := await process.stdout.readline():
                self._answer(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            # ValueError: no JSON, or longer than _MAX_LINE_BYTES. RecursionError: nested too deeply
            reason = f": it was killed, because what it wrote is no reply ({error!r:.200})"
            process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    while await process.stdout.read(2**16):  # asyncio reports an end only after the end of the output
                        pass
        self._num_deaths += 1
        code = await process.wait()  # its output has ended, so it ends now
        ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
        died = f"the process of the agent {self._name} died with {ended}{reason}. Its log: {self._log_file}"
        for asked, future in self._calls.values():
            if asked is process and not future.done():
                future.set_exception(EpisodeFailedError(died))

    def _answer(self, reply: dict[str, Any]) -> None:
        _, future = self._calls.get(reply["call"], (None, None))
        self._num_deaths = 0
        if future is None or future.done():
            return
        if "fault" in reply:
            future.set_exception(AgentRaisedError(Fault(*reply["fault"])))
        elif "no_number" in reply:
            said = f"the reward that the agent returns must be a number, got {reply['no_number']}"
            future.set_exception(EpisodeFailedError(said))
        else:
            future.set_result(reply["reward"])


async def _wait_for_end(process: asyncio.subprocess.Process) -> None:
    """Wait until a process has ended. Raises TimeoutError after END_S."""
    async with asyncio.timeout(END_S):
        await process.wait()


def _has_ended(starting: asyncio.Task[asyncio.subprocess.Process]) -> bool:
    return starting.exception() is not None or starting.result().returncode is not None


def _tail(log_file: Path) -> str:
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-20:])
