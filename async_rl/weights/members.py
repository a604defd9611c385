"""Tracks which servers of a pool get the weights. The driver reports, from another thread, which died or came back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any

from async_rl.config import Limit
from async_rl.errors import WaitTimeoutError, WeightSyncError


class ServerMembership:
    """Collects which rollout servers died or came back; the learner applies these changes between two pushes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._urls: dict[str, str] = {}
        """URLs of servers that wait for a push in `join`, by name."""
        self._changed: set[str] = set()
        """The names of servers that left or came back since the last `apply`."""
        self._joining: dict[str, Future[None]] = {}
        """The end of the `join` of each server that waits, by URL."""

    def leave(self, name: str) -> None:
        """Note that a server died, so that the next push does not try to reach it; its `join` ends with an error."""
        with self._lock:
            self._fail(name)
            self._changed.add(name)

    def add(self, name: str, url: str) -> Future[None]:
        """Add the new server `name` at `url` to those that get the next push, which ends the returned future."""
        with self._lock:
            self._urls[name] = url
            self._changed.add(name)
            joined = self._joining[url] = Future()
        return joined

    def join(self, name: str, url: str, limit: Limit, added: Callable[[str], object] = lambda name: None) -> None:
        """Add the new server `name` at `url`, call `added` with its name, and wait until it holds the current version.

        Raises:
            WeightSyncError, WaitTimeoutError: the server died before that, or there was no push within `limit`.
        """
        try:
            joined = self.add(name, url)
            added(name)
            joined.result(limit.seconds)
        except TimeoutError:
            raise WaitTimeoutError(f"{name} waited {limit} for the learner's current weights") from None

    def someone_waits(self) -> bool:
        """Return whether a server waits in `join`, and so needs an extra push."""
        return bool(self._urls)

    def apply(self, servers: dict[str, str]) -> tuple[str, ...]:
        """Take servers that died out of `servers`, {name: URL} of those to push to, and add those that came back.

        Returns:
            The names of all these, each once: a server that waits may have been asked to release its memory since.
        """
        with self._lock:
            changed = tuple(sorted(self._changed))
            self._changed.clear()
            for name in changed:
                servers.pop(name, None)
                if name in self._urls:
                    servers[name] = self._urls[name]
        return changed

    def pushed(self, servers: dict[str, str], lost: dict[str, str]) -> None:
        """End the wait in `join` of each server that a push to `servers` reached; for those `lost`, with an error.

        Both are {name: URL pushed to}: a server that has taken the place of a lost one meanwhile still waits.
        """
        with self._lock:
            for name, url in lost.items():
                if self._urls.get(name) == url:
                    self._fail(name)
            for name in [name for name, url in self._urls.items() if servers.get(name) == url]:
                self._joining.pop(self._urls.pop(name)).set_result(None)

    def _fail(self, name: str) -> None:
        """End the `join` of the server, if it waits, with the error that the server has died."""
        if url := self._urls.pop(name, ""):
            error = WeightSyncError(f"{name} died before it had the learner's current weights")
            self._joining.pop(url).set_exception(error)


PROBES = 2
"""A server that misses so many probes in a row is taken for dead; a busy one may miss a single one."""
PAUSE_S = 0.2
Probes = Mapping[str, Callable[[], bool]]


def find_silent(probes: Probes) -> tuple[str, ...]:
    """Return the names of the servers whose probe says PROBES times in a row that they do not answer."""
    silent = dict(probes)
    with ThreadPoolExecutor(max(1, len(probes))) as threads:
        for _ in range(PROBES):
            answers = list(threads.map(lambda probe: probe(), silent.values()))
            silent = {name: silent[name] for name, is_alive in zip(silent, answers, strict=True) if not is_alive}
    return tuple(silent)


def wait_for_silent(probes: Probes, limit_s: float) -> tuple[str, ...]:
    """Wait until a server does not answer, and return the names of all that do not; () after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (silent := find_silent(probes)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return silent


def wait_for_all(probes: Probes, limit_s: float) -> tuple[str, ...]:
    """Wait until all servers answer, and return (); after `limit_s` the names of those that still do not."""
    deadline = time.monotonic() + limit_s
    while (silent := find_silent(probes)) and time.monotonic() < deadline:
        time.sleep(PAUSE_S)
    return silent


def start_together(calls: Mapping[str, Callable[[], Any]], limit: Limit, what: str) -> Callable[[], dict[str, Any]]:
    """Start all calls, each in its own thread; return a function that waits for their results by name.

    The threads are daemons: a collective that can no longer complete must not keep the process from ending.

    Raises (the returned function does):
        WeightSyncError: a call failed; the message names it. The other calls may still be running.
        WaitTimeoutError: a call waited too long itself, or calls are still running after `limit`; the message names
            them.
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
