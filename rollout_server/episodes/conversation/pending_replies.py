"""The replies of a session that no caller has received yet: a request may get the reply of an earlier caller that has
gone.

A reply is received at most once, and only what was received is trained.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Reply = TypeVar("Reply")

RequestKey = tuple[bytes, int | None, tuple[str, ...]]
"""A request: the digest of its conversation, max_tokens, and stop texts. Requests with the same key are equal."""


@dataclass(slots=True, eq=False)
class PendingReply(Generic[Reply]):
    """A reply that is sampled, or was sampled, and that no caller has received yet."""

    key: RequestKey
    sampling: asyncio.Task[Reply]
    has_caller: bool = True
    """Whether a caller waits for it, or is receiving it. If not, the next equal request gets it."""
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its caller has received it, or has gone; and if there will be no reply."""


class PendingReplies(Generic[Reply]):
    """The pending replies of one session, oldest first. The first whose caller has gone is given out, or given up."""

    def __init__(self) -> None:
        self._replies: list[PendingReply[Reply]] = []

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, key: RequestKey, sampling: asyncio.Task[Reply]) -> PendingReply[Reply]:
        """Add a reply that has begun, for a caller that waits for it. If the sampling fails, it is removed."""
        pending = PendingReply(key, sampling)
        self._replies.append(pending)

        def remove_failed(task: asyncio.Task[Reply]) -> None:
            if task.cancelled() or task.exception() is not None:  # marks it as seen: a caller that has gone does not
                self.remove(pending)

        sampling.add_done_callback(remove_failed)
        return pending

    def remove(self, pending: PendingReply[Reply]) -> None:
        """Remove a reply, which was received, failed or is given up. It need not be there."""
        if pending in self._replies:
            self._replies.remove(pending)
        pending.settled.set()

    def release(self, pending: PendingReply[Reply]) -> None:
        """Let the next equal request have a reply, because its caller has gone."""
        pending.has_caller = False
        pending.settled.set()

    def take(self, key: RequestKey) -> PendingReply[Reply] | None:
        """Return the oldest reply to a request equal to `key` whose caller has gone, for a new caller."""
        for pending in self._replies:
            if pending.key == key and not pending.has_caller:
                pending.has_caller = True
                pending.settled.clear()
                return pending
        return None

    async def wait(self, key: RequestKey) -> bool:
        """Wait until the oldest reply to a request equal to `key` is settled; return False at once if there is none."""
        oldest = next((pending for pending in self._replies if pending.key == key), None)
        if oldest is not None:
            await oldest.settled.wait()
        return oldest is not None

    def wake_all(self) -> None:
        """End all waits, as the session ends."""
        for pending in self._replies:
            pending.settled.set()

    def can_give_up(self) -> bool:
        """Return whether there is a reply without a caller."""
        return any(not pending.has_caller for pending in self._replies)

    def give_up(self) -> None:
        """Remove the oldest reply without a caller, and end its sampling."""
        pending = next(pending for pending in self._replies if not pending.has_caller)
        pending.sampling.cancel()
        self.remove(pending)
