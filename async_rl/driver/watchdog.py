"""The watchdog: it asks every process every few seconds what it does, and finds those that hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Set
from contextlib import suppress

import ray
from ray import ObjectRef

from async_rl.config import Config
from async_rl.driver.actor_group import ActorGroup
from async_rl.errors import AsyncRLError, ProcessDiedError, ProcessKilledError, WaitTimeoutError
from async_rl.telemetry.status import Status, write_status

WATCH_INTERVAL_S = 5.0
ANSWER_S = 0.3
"""The watchdog waits so long for answers; a later answer is taken in at the next turn."""


class Watchdog:
    """Knows what each process said last, and when; writes it to status.json for `async-rl status`."""

    def __init__(self, config: Config, processes: ActorGroup) -> None:
        self._config = config
        self._processes = processes
        self._statuses: dict[str, Status] = {}
        self._heard_s: dict[str, float] = {}
        self._questions: dict[asyncio.Task[Status | None], str] = {}

    def begin(self, name: str) -> None:
        """A process of this name has just been started: it has said nothing yet, and does not count as silent."""
        self.forget(name)
        self._heard_s[name] = time.monotonic()

    def forget(self, name: str) -> None:
        """The process is gone: neither its last status nor its silence counts any more."""
        self._statuses.pop(name, None)
        for question in [question for question, asked in self._questions.items() if asked == name]:
            question.cancel()
            del self._questions[question]

    async def look(self) -> list[tuple[str, AsyncRLError]]:
        """After WATCH_INTERVAL_S, ask every process what it does, and write status.json.

        Returns:
            The processes that count as dead, each with the reason.
        """
        await asyncio.sleep(WATCH_INTERVAL_S)
        asked = set(self._questions.values())
        for name, actor in self._processes.actors.items():
            if name not in asked:
                self._questions[asyncio.create_task(_answer(actor.status.remote()))] = name
        if self._questions:
            await asyncio.wait(self._questions, timeout=ANSWER_S)
        for question in [question for question in self._questions if question.done()]:
            name = self._questions.pop(question)
            if status := question.result():
                self._statuses[name] = status
                self._heard_s[name] = time.monotonic()
        self.write_status("running")
        dead = [*self._overdue(), *self._silent(asked.intersection(self._questions.values()))]
        if dead:
            await self._processes.dump_stacks()
        return [(name, type(error)(f"{error}{self._processes.log_tail(name)}")) for name, error in dead]

    def write_status(self, note: str) -> None:
        """
        Args:
            note: on the run as a whole: `running`, or how it ended.
        """
        known = [
            self._processes.place(name, self._statuses[name])
            for name in self._processes.actors if name in self._statuses
        ]
        write_status(self._config.run_dir, known, note)

    def _silent(self, unanswered: Set[str]) -> list[tuple[str, AsyncRLError]]:
        """Processes that were asked at an earlier turn and have been silent for too long since.

        Those asked at this turn do not count: had the driver been held up, it would have heard from none of them.
        """
        found: list[tuple[str, AsyncRLError]] = []
        for name in sorted(unanswered & self._processes.actors.keys()):
            silent_s, setting = self._config.timeouts.silent_s, "timeouts.silent_s"
            outlived_s = self._config.timeouts.wire_s / 3
            if name == "buffer" and self._config.buffer.journal and outlived_s < silent_s:
                silent_s, setting = outlived_s, "a third of timeouts.wire_s: its clients give up after all of it"
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
        """Processes that wait longer than their own limit by more than timeouts.silent_s: they will not give up."""
        found: list[tuple[str, AsyncRLError]] = []
        for name, status in list(self._statuses.items()):
            waited_s = status.waited_s + time.monotonic() - self._heard_s[name]
            is_overdue = status.limit_s and waited_s > status.limit_s + self._config.timeouts.silent_s
            if name in self._processes.actors and is_overdue:
                del self._statuses[name]
                found.append((name, WaitTimeoutError(
                    f"{self._processes.on_host(name)} {status.doing} and has waited {waited_s:.0f} s on "
                    f"{status.waits_on}; {status.limit_s:.0f} s are its limit, which it did not keep. Every process "
                    f"that answers wrote its stacks into its log"
                )))
        return found


async def _answer(call: ObjectRef) -> Status | None:
    """The status of a process; None if the process is dead, which the task that follows it sees as well."""
    with suppress(ray.exceptions.RayError):
        status: Status = await call
        return status
    return None
