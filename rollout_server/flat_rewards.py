"""Watches for groups in which every answer gets the same reward, from which nothing can be learned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from async_rl.types import Prompt
from rollout_server.episodes.episode import Episode

SHOWN_CHARACTERS = 300
_KEPT_GROUPS = 16
"""The number of newest groups of which the warning describes the answers."""


class FlatRewards:
    """Counts the groups in a row in which every answer had one and the same reward; a worker logs its warning.

    Args:
        limit: the number of groups in a row after which `add` returns the warning.
        has_answer: whether the reward can read an answer from a response, or None if that is not known.
    """

    def __init__(self, limit: int, has_answer: Callable[[Prompt, str], bool | None]) -> None:
        self._limit = limit
        self._has_answer = has_answer
        self._count = 0
        self._reward = 0.0
        self._groups: deque[tuple[Prompt, Sequence[Episode]]] = deque(maxlen=_KEPT_GROUPS)

    def add(self, prompt: Prompt, episodes: Sequence[Episode]) -> str:
        """Count a group; return the warning if it is the `limit`-th in a row with the same reward, else ""."""
        episodes = [episode for episode in episodes if episode.rows]
        rewards = {episode.reward for episode in episodes}
        if rewards != {self._reward}:
            self._count, self._reward = 0, episodes[0].reward
            self._groups.clear()
        if len(rewards) > 1:
            return ""
        self._count += 1
        self._groups.append((prompt, episodes))
        return self._warning() if self._count == self._limit else ""

    def _warning(self) -> str:
        answers = [(prompt, episode) for prompt, group in self._groups for episode in group]
        cut = sum(episode.rows[-1].finish_reason == "length" for _, episode in answers)
        found = [self._has_answer(prompt, episode.answer) for prompt, episode in answers]
        parts = [f"{cut / len(answers):.0%} were cut off by a limit on tokens (rollout.max_response_tokens) or turns"]
        if None not in found:
            parts.append(f"in {found.count(False) / len(answers):.0%} the reward found no answer")
        return (
            f"{self._limit} rollout groups in a row had the same reward, {self._reward:g}, for every answer: they have "
            f"nothing to teach. Of their last {len(answers)} answers {', and '.join(parts)}. The newest one ends: "
            f"{answers[-1][1].answer[-SHOWN_CHARACTERS:]!r}"
        )
