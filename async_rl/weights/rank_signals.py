"""The words that pass between learner ranks in a push in which every rank gives weights to servers of its own.

    rank 0        pauses all servers     begin(servers) ->             reports() <-    ends the update, resumes
    other ranks   gather a first bucket  <- wait_for_begin()  send  -> report(error)
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from async_rl.config import Limit
from async_rl.weights.rank_words import RankWords

CALLS = 5
"""Calls to servers, each within timeouts.push_s, for whose end one rank may wait for another."""


class RankSignals:
    """One rank's end of the words, for all pushes of one publisher.

    Args:
        ranks: number of learner ranks, which all make as many pushes.
        call_limit: the limit of one call to a server.
    """

    def __init__(self, rank: int, ranks: int, call_limit: Limit) -> None:
        self._rank, self._others = rank, [other for other in range(ranks) if other != rank]
        self._words = RankWords("weight-push", rank)
        self._call_limit = call_limit
        self._push = 0
        """The number of this push; no word of another one is heard."""
        self._is_open = False

    def begin(self, servers: Mapping[str, str] | None) -> None:
        """Let the other ranks send to `servers`, {name: URL}, which are paused. None: the push has failed already."""
        self._push += 1
        self._is_open = servers is not None
        self._words.say(self._key("begin"), json.dumps(servers))

    def end(self) -> None:
        """End the push on rank 0: ranks that still wait for its begin hear that it has failed."""
        if not self._is_open:
            self.begin(None)
        self._is_open = False

    def wait_for_begin(self) -> dict[str, str] | None:
        """Wait for rank 0's `begin` and return its servers."""
        self._push += 1
        servers: dict[str, str] | None = json.loads(self._hear("begin", 0, "pause the servers"))
        return servers

    def report(self, error: str) -> None:
        """Tell rank 0 that this rank has sent its weights, or the error with which it has stopped sending."""
        self._words.say(self._key(str(self._rank)), json.dumps(error))

    def reports(self) -> dict[int, str]:
        """Wait on rank 0 for the reports of all others, and return those that are errors, by rank."""
        heard = {rank: json.loads(self._hear(str(rank), rank, "send its weights")) for rank in self._others}
        return {rank: error for rank, error in heard.items() if error}

    def _key(self, word: str) -> str:
        return f"{self._push}/{word}"

    def _hear(self, word: str, rank: int, what: str) -> bytes:
        return self._words.hear(self._key(word), rank, what, self._call_limit, CALLS)
