"""Tracks which servers of a pool get the weights. The driver reports, from another thread, which died or came back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

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
