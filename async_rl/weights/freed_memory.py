"""Frees what learner ranks cache on GPUs in which they and the servers take turns, before the servers allocate it.

    every rank    begin_push()               frees what the step has left
    rank 0        await_others(LEFT_BY_STEP)                              then the servers' weights come back
    every rank    free(LEFT_BY_GATHERING)    once it has gathered all weights
    rank 0        await_others(LEFT_BY_GATHERING)                         then the servers' KV caches come back

Every rank gathers all weights on its own GPU, but rank 0 alone talks to the servers: without a word of the others it
would not know when there is room on their GPUs. A server that finds none may be ended by its memory saver.
"""

from __future__ import annotations

import torch

from async_rl.config import Config, Limit
from async_rl.weights.rank_words import RankWords

LEFT_BY_STEP = "what its last step has left cached"
LEFT_BY_GATHERING = "what gathering the weights has left cached"


class FreedMemory:
    """Frees the cache of one learner rank in each push, and on rank 0 waits until the others have done so.

    Where learner and servers take no turns, it does nothing.
    """

    def __init__(self, config: Config, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._others = range(1, config.placement.learner.ranks) if config.shares_gpus else range(0)
        self._words = RankWords("freed-memory", rank) if self._others else None
        self._has_cache = config.shares_gpus and device.type == "cuda"
        self._push = 0
        """The number of this push, of which all ranks make as many; no word of another one is heard."""

    def begin_push(self) -> None:
        """Begin a push on any rank: free what the learner's last step has left."""
        self._push += 1
        self.free(LEFT_BY_STEP)

    def free(self, left: str) -> None:
        """Free what is cached, LEFT_BY_STEP or LEFT_BY_GATHERING; another rank than 0 then tells rank 0."""
        if self._has_cache:
            torch.cuda.empty_cache()
        if self._words and self._rank > 0:
            self._words.say(self._key(left, self._rank))

    def await_others(self, left: str, limit: Limit) -> None:
        """Wait on rank 0 until each other rank has freed what is `left`, for at most `limit` on each.

        Raises:
            WaitTimeoutError: one has not done so.
        """
        if self._words:
            for rank in self._others:
                self._words.hear(self._key(left, rank), rank, f"free {left}", limit)

    def _key(self, left: str, rank: int) -> str:
        return f"{self._push}/{left}/{rank}"
