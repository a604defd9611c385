"""Watches for groups in which every answer gets the same reward, from which nothing can be learned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from async_rl.types import Prompt
from rollout_server.engines.base import Completion

SHOWN_CHARACTERS = 300
_KEPT_GROUPS = 16
"""The number of newest groups of which the warning describes the answers."""


class FlatRewards:
    """Counts groups in a row of which all answers had one and the same reward, and describes them in a warning.

    Args:
        limit: the number of groups in a row after which `add` returns the warning.
        has_answer: whether the reward can read an answer from a response, or None if that is not known.
    """

    def __init__(
        self, limit: int, decode: Callable[[Completion], str], has_answer: Callable[[Prompt, str], bool | None]
    ) -> None:
        self._limit = limit
        self._decode = decode
        self._has_answer = has_answer
        self._count = 0
        self._reward = 0.0
        self._groups: deque[tuple[Prompt, Sequence[Completion]]] = deque(maxlen=_KEPT_GROUPS)

    def add(self, prompt: Prompt, completions: Sequence[Completion], rewards: Sequence[float]) -> str:
        """Count a group; return the warning if it is the `limit`-th in a row with the same reward, else ""."""
        if set(rewards) != {self._reward}:
            self._count, self._reward = 0, rewards[0]
            self._groups.clear()
        if len(set(rewards)) > 1:
            return ""
        self._count += 1
        self._groups.append((prompt, completions))
        return self._warning() if self._count == self._limit else ""

    def _warning(self) -> str:
        answers = [(prompt, completion) for prompt, group in self._groups for completion in group]
        texts = [self._decode(completion) for _, completion in answers]
        cut = sum(completion.finish_reason == "length" for _, completion in answers)
        found = [self._has_answer(prompt, text) for (prompt, _), text in zip(answers, texts, strict=True)]
        parts = [f"{cut / len(answers):.0%} were cut off at rollout.max_response_tokens"]
        if None not in found:
            parts.append(f"in {found.count(False) / len(answers):.0%} the reward found no answer")
        return (
            f"{self._limit} rollout groups in a row had the same reward, {self._reward:g}, for every answer: they have "
            f"nothing to teach. Of their last {len(answers)} answers {', and '.join(parts)}. The newest one ends: "
            f"{texts[-1][-SHOWN_CHARACTERS:]!r}"
        )
