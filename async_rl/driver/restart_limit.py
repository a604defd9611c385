"""Limits how often the driver restarts a server."""

from __future__ import annotations

from collections import Counter

from async_rl.config import Config
from async_rl.errors import AsyncRLError, ProcessDiedError, WaitTimeoutError, WeightSyncError


class RestartLimit:
    """Counts the deaths of each server since the last step."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._deaths: Counter[str] = Counter()

    def count(self, name: str, error: AsyncRLError) -> None:
        """Count a death. Raise `error`, by which the server was lost, if a restart can't mend it, if staleness.mode is
        exact and its groups are lost, or if it has died more than placement.rollout.max_restarts times since the last
        step.
        """
        self._deaths[name] += 1
        limit = self._config.placement.rollout.max_restarts
        is_mendable = isinstance(error, ProcessDiedError | WaitTimeoutError | WeightSyncError)
        if not is_mendable or (self._config.staleness.mode == "exact" and name.startswith("rollout")):
            raise error
        if self._deaths[name] > limit:
            often = f"\nIt died {limit + 1} times since the last step (placement.rollout.max_restarts)."
            raise type(error)(f"{error}{often if limit else ''}") from None

    def clear(self) -> None:
        """Begin to count anew, after a step."""
        self._deaths.clear()
