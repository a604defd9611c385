"""Who is alive, and who waits longer than it may: the driver asks every process every few seconds what it does."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from contextlib import suppress
from typing import Any

import ray

from async_rl.config import Config
from async_rl.driver.actor_group import ActorGroup
from async_rl.errors import AsyncRLError, ProcessDiedError, ProcessKilledError, WaitTimeoutError
from async_rl.telemetry.status import Status, write_status

WATCH_INTERVAL_S = 5.0
ANSWER_S = 0.3
"""For which the driver waits until all have said what they do; who takes longer is heard at the next turn."""


class Watchdog:
    """What each process said last, and when; written to status.json for `async-rl status`."""

    def __init__(self, config: Config, processes: ActorGroup) -> None:
        self._config = config
        self._processes = processes
        self._statuses: dict[str, Status] = {}
        self._heard_s: dict[str, float] = {}
        self._questions: dict[Any, str] = {}
        self._next_s = 0.0

    def begin(self, name: str) -> None:
        """A process of this name has just been started: nothing is known of it, and it is not silent yet."""
        self.forget(name)
        self._heard_s[name] = time.monotonic()

    def forget(self, name: str) -> None:
        self._statuses.pop(name, None)
        self._questions = {ref: of for ref, of in self._questions.items() if of != name}

    def look(self) -> Iterator[tuple[str, AsyncRLError]]:
        """At most every WATCH_INTERVAL_S: hear all, write it down; yields whoever counts as dead, one after the other.

        Before the next is looked for, the caller has `forget` or `begin` called for what it ends.
        """
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + WATCH_INTERVAL_S
        asked = set(self._questions.values())
        for name, actor in self._processes.actors.items():
            if name not in asked:
                self._questions[actor.status.remote()] = name
        answered, _ = ray.wait(list(self._questions), num_returns=len(self._questions), timeout=ANSWER_S)
        for ref in answered:
            name = self._questions.pop(ref)
            with suppress(ray.exceptions.RayError):  # its stream tells of its death
                self._statuses[name] = ray.get(ref)
                self._heard_s[name] = time.monotonic()
        self.write_status("running")
        yield from self._overdue()
        yield from self._silent(asked.intersection(self._questions.values()))

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

    def _silent(self, unanswered: Set[str]) -> Iterator[tuple[str, AsyncRLError]]:
        """Of those who were asked at an earlier turn: had the driver been away, it would have heard none of them."""
        now_s = time.monotonic()  # what the caller does about one does not count against the next
        for name in sorted(unanswered & self._processes.actors.keys()):
            silent_s, setting = self._config.timeouts.silent_s, "timeouts.silent_s"
            outlived_s = self._config.timeouts.wire_s / 3
            if name == "buffer" and self._config.buffer.journal and outlived_s < silent_s:
                silent_s, setting = outlived_s, "a third of timeouts.wire_s: its clients give up after all of it"
            if now_s - self._heard_s[name] <= silent_s:
                continue
            last = self._statuses.get(name)
            self._processes.dump_stacks()
            kind = ProcessKilledError if name == "buffer" else ProcessDiedError
            yield name, kind(
                f"{self._processes.on_host(name)} has given no sign of life for {silent_s:.0f} s ({setting}); "
                f"the last thing heard: it {last.doing if last else 'starts'}{self._processes.log_tail(name)}"
            )

    def _overdue(self) -> Iterator[tuple[str, AsyncRLError]]:
        """Whoever waits longer than its own limit, by timeouts.silent_s and more, does not give up by itself."""
        margin_s = self._config.timeouts.silent_s
        for name, status in list(self._statuses.items()):
            waited_s = status.waited_s + time.monotonic() - self._heard_s[name]
            if name in self._processes.actors and status.limit_s and waited_s > status.limit_s + margin_s:
                del self._statuses[name]
                self._processes.dump_stacks()
                yield name, WaitTimeoutError(
                    f"{self._processes.on_host(name)} {status.doing} and has waited {waited_s:.0f} s on "
                    f"{status.waits_on}; {status.limit_s:.0f} s are its limit, which it did not keep. Every process "
                    f"that answers wrote its stacks into its log{self._processes.log_tail(name)}"
                )
