"""An agent in a process of its own, with a Python of its own: its packages may be incompatible with ours.

`AgentProcess` is an agent itself, so `AgentRunner` plays with it as with a function.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import sys
from contextlib import suppress
from contextvars import Context
from pathlib import Path
from typing import Any

from async_rl.base.errors import ProcessDiedError, WaitTimeoutError
from rollout_server.episodes.episode import EpisodeFailedError
from rollout_server.episodes.user_code import agent_host
from rollout_server.episodes.user_code.faults import AgentRaisedError, Fault
from rollout_server.question import Question

MAX_DEATHS = 3
"""The run ends when the process has died this many times without an answer in between."""
START_S = 120.0
"""How long the process may take to import the agent."""
END_S = 5.0
"""How long the process may take to end after its standard input has."""
_MAX_LINE_BYTES = 2**24


class AgentProcess:
    """Starts a process of its own for `task.agent`, with the first call and again after its death, and calls the agent.

    Args:
        name: the agent, as `module:name`, which only the process imports.
        python: the interpreter of the agent's own environment. Empty: the one of this process.
        log_file: gets what the agent prints.
    """

    def __init__(self, name: str, log_file: Path, python: str = "") -> None:
        self._name = name
        self._python = python or sys.executable
        self._log_file = log_file
        self._starting: asyncio.Task[asyncio.subprocess.Process] | None = None
        """The task that starts the process and returns it. It goes on if the episode that began it is cancelled."""
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[asyncio.subprocess.Process, asyncio.Future[float]]] = {}
        self._num_deaths = 0

    async def ready(self) -> None:
        """Wait until the process has imported the agent; start one if none runs.

        Raises:
            ProcessDiedError: the process can't start, or died MAX_DEATHS times without an answer in between.
            WaitTimeoutError: the process did not import the agent within START_S.
        """
        await self._running()

    async def __call__(self, question: Question, base_url: str, api_key: str) -> float:
        """Let the agent work on a question, and return its reward. If cancelled, cancel the agent too.

        Raises:
            EpisodeFailedError: the process died meanwhile, or the agent returned no number.
            AgentRaisedError: the agent raised.
            ProcessDiedError, WaitTimeoutError: the process can't start; see `ready`.
        """
        process = await self._running()
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
        """End the process, by force if it does not end by itself."""
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

    async def _running(self) -> asyncio.subprocess.Process:
        """Return the agent's process; start one if none runs. ProcessDiedError: it has died MAX_DEATHS times."""
        if self._starting is None or (self._starting.done() and _has_ended(self._starting)):
            if self._num_deaths >= MAX_DEATHS:
                raise ProcessDiedError(
                    f"the process of the agent {self._name} died {MAX_DEATHS} times without an answer in between. The "
                    f"end of its log {self._log_file}:\n{_tail(self._log_file)}"
                )
            self._starting = asyncio.create_task(self._start(), name=f"start of {self._name}", context=Context())
        return await asyncio.shield(self._starting)

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
        """Give each reply to its call, until the process ends; then fail the calls that it has not answered.

        A process that writes anything but replies is killed: no later reply of it could be trusted, or even read.
        """
        assert process.stdout is not None
        reason = ""
        try:
            while line := await process.stdout.readline():
                self._answer(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:  # ValueError: no JSON, or longer than _MAX_LINE_BYTES
            reason = f": it was killed, because what it wrote is no reply ({error!r:.200})"
            process.kill()
            with suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    while await process.stdout.read(2**16):  # asyncio reports an end only after that of the output
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
