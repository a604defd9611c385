"""Defines Watchdog, which asks every process for its status every few seconds, and finds processes that hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence, Set
from contextlib import suppress

import ray
from ray import ObjectRef

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, ProcessDiedError, ProcessKilledError, WaitTimeoutError
from async_rl.base.telemetry.status import RUNNING, ServerStatus, Status, write_status
from async_rl.run.processes.actor_group import ActorGroup

WATCH_INTERVAL_S = 5.0
ANSWER_S = 0.3
"""Seconds that `Watchdog.look` waits for answers. Its next call reads later answers."""


class Watchdog:
    """Finds processes that hang, and writes the last status of each process to status.json, for `async-rl status`."""

    def __init__(self, config: Config, processes: ActorGroup) -> None:
        self._config = config
        self._processes = processes
        self._statuses: dict[str, Status] = {}
        self._heard_s: dict[str, float] = {}
        self._starting: set[str] = set()
        """The processes that have not answered yet. Their start has a time limit of its own."""
        self._questions: dict[str, asyncio.Task[Status | None]] = {}
        self.note = RUNNING
        """The state of the whole run: that it is running, or why its watcher has paused it."""
        self.too_few_servers = ""
        """Why the learner is paused without enough servers; empty if there are enough."""
        self.servers: Callable[[], Sequence[ServerStatus]] = tuple
        """Returns the states of the servers."""
        self.alarms = ""
        """The run's alarms as text; empty if there was none."""

    def begin(self, name: str, is_up: bool = True) -> None:
        """Watch process `name`. Call it when the process has been started.

        Args:
            is_up: whether the process can answer already. If so, its silence counts from now on, otherwise from its
                first answer.
        """
        self.forget(name)
        self._heard_s[name] = time.monotonic()
        if not is_up:
            self._starting.add(name)

    def forget(self, name: str) -> None:
        """Forget process `name`, which is lost: its last status, and the question it has not answered."""
        self._statuses.pop(name, None)
        self._starting.discard(name)
        if question := self._questions.pop(name, None):
            question.cancel()

    async def look(self) -> list[tuple[str, AsyncRLError]]:
        """Sleep for WATCH_INTERVAL_S, ask every process for its status, and write status.json.

        Returns:
            (name, error) of each process that hangs and counts as dead.
        """
        await asyncio.sleep(WATCH_INTERVAL_S)
        asked = set(self._questions)
        for name in self._processes.actors.keys() - asked:
            self._questions[name] = asyncio.create_task(_answer(self._processes.actors[name].status.remote()))
        if self._questions:
            await asyncio.wait(self._questions.values(), timeout=ANSWER_S)
        for name in [name for name, question in self._questions.items() if question.done()]:
            if status := self._questions.pop(name).result():
                self._statuses[name] = status
                self._heard_s[name] = time.monotonic()
                self._starting.discard(name)
        self.write_status(self.too_few_servers if self.note == RUNNING and self.too_few_servers else self.note)
        dead, starts = [*self._overdue(), *self._silent(asked & self._questions.keys())], self._processes.starts.copy()
        if dead:
            await self._processes.dump_stacks()  # which takes a while: a process may be started again meanwhile
        return [
            (name, type(error)(f"{error}{self._processes.log_tail(name)}"))
            for name, error in dead if self._processes.starts[name] == starts[name]
        ]

    def write_status(self, note: str) -> None:
        """Write the last status of every process to status.json.

        Args:
            note: the state of the whole run: that it is running, why it is paused, or how it ended.
        """
        known = [
            self._processes.place(name, self._statuses[name])
            for name in self._processes.actors if name in self._statuses
        ]
        write_status(self._config.run_dir, known, note, self.alarms, self.servers())

    def _silent(self, unanswered: Set[str]) -> list[tuple[str, AsyncRLError]]:
        """Return (name, error) of each process in `unanswered` that has been silent for too long.

        Args:
            unanswered: processes that have not answered the question of an earlier `look`.
        """
        found: list[tuple[str, AsyncRLError]] = []
        for name in sorted((unanswered & self._processes.actors.keys()) - self._starting):
            silent_s, setting = self._config.timeouts.silent_s, "timeouts.silent_s"
            outlived_s = self._config.timeouts.buffer_s / 3
            if name == "buffer" and self._config.buffer.journal and outlived_s < silent_s:
                silent_s, setting = outlived_s, "a third of timeouts.buffer_s: its clients give up after all of it"
            if time.monotonic() - self._heard_s[name] <= silent_s:
                continue
            last = self._statuses.get(name)
            kind = ProcessKilledError if name == "buffer" else ProcessDiedError
            found.append((name, kind(
                f"{self._processes.on_host(name)} has given no sign of life for {silent_s:.0f} s ({setting}); "
                f"the last thing heard: it {last.doing if last else 'starts'}"
            )))
        return found

    def _overdue(self) -> list[tuple[str, AsyncRLError]]:
        """Return (name, WaitTimeoutError) of each process that has waited for silent_s longer than its limit.

        The statuses of these processes are forgotten.
        """
        found: list[tuple[str, AsyncRLError]] = []
        for name, status in list(self._statuses.items()):
            waited_s = status.waited_s + time.monotonic() - self._heard_s[name]
            is_overdue = status.limit_s and waited_s > status.limit_s + self._config.timeouts.silent_s
            if name in self._processes.actors and is_overdue:
                del self._statuses[name]
                found.append((name, WaitTimeoutError(
                    f"{self._processes.on_host(name)} {status.doing} and has waited {waited_s:.0f} s on "
                    f"{status.waits_on}, longer than its limit of {status.limit_s:.0f} s. Every process that still "
                    f"answers has written its stacks into its log"
                )))
        return found


async def _answer(call: ObjectRef) -> Status | None:
    """Wait for the status of a process, and return it; None if the process is dead, which the supervisor handles."""
    with suppress(ray.exceptions.RayError):
        status: Status = await call
        return status
    return None
