"""Words that learner ranks say to each other in a push, and wait for.

They pass through the store of the ranks' default process group, not through collectives: gathering weights is one, and
ranks of which only some have failed would no longer make the same collectives in the same order.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from async_rl.config import Limit
from async_rl.errors import WaitTimeoutError


class RankWords:
    """One rank's end of the words about one subject. The default process group must exist.

    Args:
        subject: begins the keys of these words in the store, so that no other words have the same.
    """

    def __init__(self, subject: str, rank: int) -> None:
        self._rank = rank
        default: Any = _get_default_store()
        self._store = PrefixStore(subject, default.clone())  # a connection of its own: others wait on that one

    def say(self, key: str, text: str = "") -> None:
        """Let every rank hear `text` under `key`, now or later."""
        self._store.set(key, text)

    def hear(self, key: str, speaker: int, what: str, limit: Limit, times: int = 1) -> bytes:
        """Wait until the rank `speaker` has said something under `key`, and return it.

        Args:
            what: names what the speaker does before it says the word, for the error.
            times: the wait may take so many times `limit`.

        Raises:
            WaitTimeoutError: it has not done so in that time.
        """
        try:
            self._store.wait([key], timedelta(seconds=times * limit.seconds))
            return bytes(self._store.get(key))
        except DistError as error:
            waited = f"{times} times {limit}" if times > 1 else str(limit)
            raise WaitTimeoutError(
                f"learner rank {self._rank} waited {waited} for learner rank {speaker} to {what}: {error}"
            ) from error
