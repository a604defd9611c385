"""The servers of a pool that get weight pushes, and calls to all of them in parallel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from async_rl.base.config import Config, Limit
from async_rl.base.config.resolve import engine_of, resolve
from async_rl.base.errors import WaitTimeoutError, WeightSyncError
from async_rl.base.weights.server_admin import ServerAdmin

PROBES = 2
"""A server that misses this many probes in a row counts as dead. A busy one may miss a single probe."""
PAUSE_S = 0.2
LOST_WITHIN_S = 10.0
"""A server that dies in a push stops answering within this time after the push has failed."""
Probes = Mapping[str, Callable[[], bool]]
"""For each server, by name: a function that returns whether it answers."""


class Member(NamedTuple):
    """One start of a server. After a restart the server is another member, even at the same URL.

    A process group or a base of changed weights is valid only for the members with which it was made.
    """

    name: str
    url: str
    start: int
    """The number of this start of the server in the run, from 1."""


class Members:
    """The servers that get the next push, and those that have joined since.

    The driver reports new and lost servers from other threads. The learner applies the reports between two pushes, on
    rank 0. Other ranks get the members from rank 0 in the pushes that need them.

    Args:
        urls: URLs of the first servers, by name. Each is in its first start.
        purpose: why weights are pushed to these members. Ranks use it to tell the pushes of two transports apart.
    """

    def __init__(self, config: Config, urls: Mapping[str, str] | None = None, purpose: str = "push") -> None:
        self.purpose = purpose
        self.limit = config.timeouts.limit("push_s")
        """How long one call to a server may take. Rank 0 may change it between two pushes."""
        self._config = config
        self._lock = threading.Lock()
        self._current = {name: Member(name, url, 1) for name, url in (urls or {}).items()}
        self._joining: dict[str, Member] = {}
        """The servers that have joined and do not get pushes yet, by name."""
        self._left: set[tuple[str, int]] = set()
        """(name, start) of each lost server that may still be a member."""
        self._admins: dict[Member, ServerAdmin] = {}

    def join(self, name: str, url: str, start: int) -> None:
        """Report a new server. The driver calls it."""
        with self._lock:
            self._joining[name] = Member(name, url, start)

    def leave(self, name: str, start: int) -> None:
        """Report that a server is lost or leaves: it gets no further push. The driver calls it."""
        with self._lock:
            self._left.add((name, start))
            if name in self._joining and self._joining[name].start == start:
                del self._joining[name]

    def someone_waits(self) -> bool:
        """Return whether a new server waits for its first weights."""
        return bool(self._joining)

    def take_joining(self) -> tuple[Member, ...]:
        """Return the servers that have joined since the last call. The caller pushes weights to them."""
        with self._lock:
            joining, self._joining = tuple(self._joining.values()), {}
        return joining

    def admit(self, members: Iterable[Member]) -> None:
        """Make `members` get the next push, unless they have left. Call it only between two pushes."""
        self._current |= {member.name: member for member in members}
        self.apply_reports()

    def apply_reports(self) -> None:
        """Remove the members that the driver has reported as lost. Call it only between two pushes."""
        with self._lock:
            kept = [each for each in self._current.values() if (each.name, each.start) not in self._left]
            self._left.clear()
        self.replace(kept)

    def replace(self, members: Iterable[Member]) -> None:
        """Set the current members."""
        self._current = {member.name: member for member in members}
        current = set(self._current.values())
        self._admins = {member: admin for member, admin in self._admins.items() if member in current}

    def remove(self, names: Iterable[str]) -> tuple[Member, ...]:
        """Remove members that a push has lost, and return them."""
        lost = tuple(self._current[name] for name in names)
        self.replace(member for member in self.current if member not in lost)
        return lost

    def __bool__(self) -> bool:
        return bool(self._current)

    @property
    def current(self) -> tuple[Member, ...]:
        """The members of the next push, or of the running one."""
        return tuple(self._current.values())

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._current)

    def admin(self, name: str) -> ServerAdmin:
        """Return the ServerAdmin of the server `name`. Its class depends on the server's engine."""
        member = self._current[name]
        if member not in self._admins:
            config = resolve(self._config, engine_of(self._config, name))
            self._admins[member] = config.rollout.engine_entry.load_admin()(config, member.url)
        return self._admins[member]

    def calls(self, call: Callable[[ServerAdmin], Any]) -> dict[str, Callable[[], Any]]:
        """Return for each server, by name, a function that calls `call` with its ServerAdmin."""
        return {name: partial(call, self.admin(name)) for name in self._current}

    def probes(self) -> dict[str, Callable[[], bool]]:
        return self.calls(lambda admin: admin.is_ready())

    def call(self, call: Callable[[ServerAdmin], Any], what: str) -> dict[str, Any]:
        """Call `call` for all servers in parallel, and return the results by name. Raises the first error immediately.

        Args:
            what: describes the calls in errors, as in "pause before a weight push".
        """
        return start_together(self.calls(call), self.limit, what)()

    def call_to_the_end(self, call: Callable[[ServerAdmin], Any]) -> None:
        """Call `call` for all servers in parallel. An error is raised only after all calls have ended."""
        admins = [self.admin(name) for name in self._current]
        with ThreadPoolExecutor(max(1, len(admins))) as threads:
            list(threads.map(call, admins))

    def tell(self, call: Callable[[ServerAdmin], None], names: Iterable[str]) -> tuple[str, ...]:
        """Call `call` for the named servers in parallel, ignoring refusals.

        Returns the names of the servers that did not answer within `limit`: they hang.
        """
        answered: set[str] = set()
        names = tuple(names)

        def tell_one(name: str) -> None:
            with suppress(WaitTimeoutError):
                with suppress(WeightSyncError):
                    call(self.admin(name))
                answered.add(name)

        with suppress(WaitTimeoutError):
            start_together({name: partial(tell_one, name) for name in names}, self.limit, "end of a push")()
        return tuple(name for name in names if name not in answered)


def find_silent(probes: Probes) -> tuple[str, ...]:
    """Return the names of the servers that miss PROBES probes in a row."""
    silent = dict(probes)
    with ThreadPoolExecutor(max(1, len(probes))) as threads:
        for _ in range(PROBES):
            answers = list(threads.map(lambda probe: probe(), silent.values()))
            silent = {name: silent[name] for name, is_alive in zip(silent, answers, strict=True) if not is_alive}
    return tuple(silent)


def wait_for_silent(probes: Probes, limit_s: float) -> tuple[str, ...]:
    """Wait until any server stops answering, and return the names of all that do not answer; () after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (silent := find_silent(probes)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return silent


def wait_for_all(probes: Probes, limit_s: float) -> tuple[str, ...]:
    """Wait until all servers answer, and return (); after `limit_s`, the names of those that still do not."""
    deadline = time.monotonic() + limit_s
    while (silent := find_silent(probes)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return silent


def start_together(calls: Mapping[str, Callable[[], Any]], limit: Limit, what: str) -> Callable[[], dict[str, Any]]:
    """Start each call in a thread of its own. Returns a function that waits for the results and returns them by name.

    The threads are daemons: a collective that can no longer complete must not keep the process from ending.

    Args:
        what: describes the calls in errors.

    Raises (the returned function does):
        WeightSyncError: a call failed; message and `names` name it. Other calls may still run.
        WaitTimeoutError: a call raised it, or calls still run after `limit`; message and `names` name them.
    """
    futures: dict[str, Future[Any]] = {name: Future() for name in calls}
    deadline = time.monotonic() + limit.seconds

    def work(name: str) -> None:
        try:
            futures[name].set_result(calls[name]())
        except BaseException as error:
            futures[name].set_exception(error)

    def wait_for_results() -> dict[str, Any]:
        done, running = wait(futures.values(), max(0.0, deadline - time.monotonic()), FIRST_EXCEPTION)
        for name, future in futures.items():
            if future in done and (error := future.exception()):
                kind = WaitTimeoutError if isinstance(error, WaitTimeoutError) else WeightSyncError
                raise kind(f"{what}: {name} failed: {error}", (name,)) from error
        if running:
            names = tuple(sorted(name for name, future in futures.items() if future in running))
            raise WaitTimeoutError(f"{what}: the learner waited {limit} for {', '.join(names)}", names)
        return {name: future.result() for name, future in futures.items()}

    for name in calls:
        threading.Thread(target=work, args=(name,), name=f"{what}: {name}", daemon=True).start()
    return wait_for_results
