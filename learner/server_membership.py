"""The rollout servers that get the weights. The driver reports, from another thread, which died or came back."""

from __future__ import annotations

import threading

from async_rl.config import Limit
from async_rl.errors import WaitTimeoutError, WeightSyncError


class ServerMembership:
    """Collects changes to the publisher's servers, which are applied between two pushes."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._urls: dict[str, str] = {}
        """URLs of servers that joined and wait for a push, by name; empty: the server left."""
        self._outcome: dict[str, str] = {}
        """`current` or `lost` for each server that waits in `join`, by URL."""

    def leave(self, name: str) -> None:
        """Remove a server that died, so that no push has to find out."""
        with self._changed:
            if url := self._urls.get(name):
                self._outcome[url] = "lost"  # ends its `join`
                self._changed.notify_all()
            self._urls[name] = ""

    def join(self, name: str, url: str, limit: Limit) -> None:
        """Add the new server `name` at `url`, and return when it holds the learner's current version.

        Raises:
            WeightSyncError: it died before that.
            WaitTimeoutError: there was no push within `limit`.
        """
        with self._changed:
            self._urls[name] = url
            self._outcome.pop(url, None)
            if not self._changed.wait_for(lambda: url in self._outcome, limit.seconds):
                raise WaitTimeoutError(f"{name} waited {limit} for the learner's current weights")
            if self._outcome.pop(url) == "lost":
                raise WeightSyncError(f"{name} died before it had the learner's current weights")

    def someone_waits(self) -> bool:
        """Whether a server waits in `join`, and needs a push out of turn."""
        return any(self._urls.values())

    def apply(self, servers: dict[str, str]) -> None:
        """Apply the changes to `servers`."""
        with self._changed:
            for name, url in self._urls.items():
                servers.pop(name, None)
                if url:
                    servers[name] = url
            self._urls = {name: url for name, url in self._urls.items() if url}

    def pushed(self, servers: dict[str, str], lost: tuple[str, ...]) -> None:
        """Report the end of a push to `servers`, during which the servers `lost` died."""
        with self._changed:
            for name in lost:
                if url := self._urls.pop(name, ""):
                    self._outcome[url] = "lost"
            for name in [name for name, url in self._urls.items() if servers.get(name) == url]:
                self._outcome[self._urls.pop(name)] = "current"
            self._changed.notify_all()
