"""The servers of a pool that get weight pushes, and calls to all of them in parallel."""

from __future__ import annotations

import threading
import time
from collections import Counter
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
    """How often a server with this name was added before; 0 for the first servers of the run."""


class Members:
    """The members that get the next push.

    The driver reports new and dead servers from other threads. The learner applies the reports between two pushes, on
    rank 0. The other ranks know the servers of the start, and get the current ones from rank 0 in pushes that need
    them.

    Args:
        urls: URLs of the first servers, by name.
    """

    def __init__(self, config: Config, urls: Mapping[str, str]) -> None:
        self.limit = config.timeouts.limit("push_s")
        """How long one call to a server may take. Rank 0 may change it between two pushes."""
        self._config = config
        self._lock = threading.Lock()
        self._current = {name: Member(name, url, 0) for name, url in urls.items()}
        self._reported: dict[str, Member | None] = {}
        """The driver's reports that are not applied yet, by server: the member that joins, or None if it left."""
        self._starts = Counter[str]()
        self._waiting: dict[Member, Future[None]] = {}
        """Members that have joined and wait for their first push."""
        self._admins: dict[Member, ServerAdmin] = {}

    def add(self, name: str, url: str) -> Future[None]:
        """Add the new server `name` to the next push, and return a future that is done when the server uses the
        weights.

        The driver calls it.
        """
        with self._lock:
            self._fail(name)
            self._starts[name] += 1
            member = self._reported[name] = Member(name, url, self._starts[name])
            served = self._waiting[member] = Future()
        return served

    def join(self, name: str, url: str, limit: Limit, added: Callable[[str], object] = lambda name: None) -> None:
        """Add the new server `name`, call `added` with its name, and wait until it serves the current version.

        Raises:
            WeightSyncError: the server died before that.
            WaitTimeoutError: no push reached it within `limit`.
        """
        try:
            served = self.add(name, url)
            added(name)
            served.result(limit.seconds)
        except TimeoutError:
            raise WaitTimeoutError(f"{name} waited {limit} for the learner's current weights") from None

    def leave(self, name: str) -> None:
        """Report that the server `name` died: it gets no further push. If `join` waits for it, that fails."""
        with self._lock:
            self._fail(name)
            self._reported[name] = None

    def someone_waits(self) -> bool:
        """Return whether a new server waits for its first push, so that an extra push is needed."""
        return bool(self._waiting)

    def apply_reports(self) -> None:
        """Apply the driver's reports of new and dead servers. Call it only between two pushes."""
        with self._lock:
            for name in sorted(self._reported):
                self._current.pop(name, None)
                if member := self._reported[name]:
                    self._current[name] = member
            self._reported.clear()
            self._forget_gone()

    def replace(self, members: Iterable[Member]) -> None:
        """On other ranks than 0: set the current members."""
        self._current = {member.name: member for member in members}
        self._forget_gone()

    def remove(self, names: Iterable[str]) -> tuple[Member, ...]:
        """Remove members that a push has lost, and return them. If `join` waits for one, that fails."""
        with self._lock:
            lost = tuple(self._current.pop(name) for name in names)
            for member in lost:
                self._fail(member.name, member)
            self._forget_gone()
        return lost

    def note_served(self) -> None:
        """End the wait in `join` for each current member, because it serves the pushed weights."""
        with self._lock:
            for member in [member for member in self._current.values() if member in self._waiting]:
                self._waiting.pop(member).set_result(None)

    def _fail(self, name: str, only: Member | None = None) -> None:
        """Fail the wait for `only`, or for every member called `name`. The caller must hold the lock."""
        for member in [each for each in self._waiting if each.name == name and only in (None, each)]:
            error = WeightSyncError(f"{name} died before it had the learner's current weights")
            self._waiting.pop(member).set_exception(error)

    def _forget_gone(self) -> None:
        current = set(self._current.values())
        self._admins = {member: admin for member, admin in self._admins.items() if member in current}

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
        WeightSyncError: a call failed; the message names it. Other calls may still run.
        WaitTimeoutError: a call raised it, or calls still run after `limit`; the message names them.
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
                raise kind(f"{what}: {name} failed: {error}") from error
        if running:
            names = tuple(sorted(name for name, future in futures.items() if future in running))
            raise WaitTimeoutError(f"{what}: the learner waited {limit} for {', '.join(names)}", names)
        return {name: future.result() for name, future in futures.items()}

    for name in calls:
        threading.Thread(target=work, args=(name,), name=f"{what}: {name}", daemon=True).start()
    return wait_for_results
