"""Describes flat groups, whose answers all get the same reward, so that nothing can be learned from them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from async_rl.base.types import Prompt
from rollout_server.episodes.episode import End, Episode

SHOWN_CHARACTERS = 300
MIXED_WARNING_GROUPS = 256
"""The fewest groups in a row with one reward each that are worth a warning, if these rewards differ between groups."""
_KEPT_GROUPS = 16
"""The warning describes the answers of so many newest groups."""
_TROUBLES: dict[End, str] = {"timeout": "ran out of time", "error": "ended with an error of the agent"}
"""The ends of an episode, in words, whose reward does not come from its last answer."""


class FlatRewards:
    """Keeps the newest flat groups, for a warning that a worker logs.

    The buffer counts them, because it sees the groups of all workers.

    Args:
        limit: the number of groups in a row with the same reward after which `add` returns the warning.
        has_answer: whether the reward can read an answer from a response, or None if that is not known.
        ends_after: the number of groups in a row with the same reward after which the run ends, as the buffer drops
            them; 0: it does not. If it does, `add` also warns of many that have one reward each, for which the learner
            waits in vain.
    """

    def __init__(
        self, limit: int, has_answer: Callable[[Prompt, str], bool | None], ends_after: int = 0
    ) -> None:
        self._limit = limit
        self._ends_after = ends_after
        self._mixed_limit = max(MIXED_WARNING_GROUPS, limit) if ends_after else math.inf
        """The number of groups in a row with one reward each after which the next warning comes. It doubles with each
        warning, so that it is not repeated for a task where few prompts have a difference."""
        self._has_answer = has_answer
        self._count = 0
        """The buffer's count of groups with the same reward after the last group with one reward."""
        self._groups: deque[tuple[Prompt, Sequence[Episode]]] = deque(maxlen=_KEPT_GROUPS)
        self.has_only_errors = True
        """Whether all episodes so far have ended with an error of the agent: the code is more likely wrong than the
        model."""

    def add(self, prompt: Prompt, episodes: Sequence[Episode], counts: tuple[int, int]) -> str:
        """Keep a group that was delivered; return the warning if with it the buffer's count reaches a limit, else "".

        Args:
            counts: two counts of groups in a row, of all workers: groups whose answers all had the same reward, for
                example only zeros, and groups with one reward each, whichever it was.
        """
        count, in_row = counts
        episodes = [episode for episode in episodes if episode.rows]
        self.has_only_errors &= all(episode.end == "error" for episode in episodes)
        self._groups.append((prompt, episodes))
        if len({episode.reward for episode in episodes}) > 1:
            return ""
        has_reached = self._count < self._limit <= count
        self._count = count
        if has_reached:
            return self._warning(episodes[0].reward)
        if count < in_row >= self._mixed_limit:
            self._mixed_limit = 2 * in_row
            return self._mixed_warning(in_row)
        return ""

    def _mixed_warning(self, in_row: int) -> str:
        flat = [{episode.reward for episode in episodes} for _, episodes in self._groups]
        newest = ", ".join(f"{reward:g}" for rewards in flat if len(rewards) == 1 for reward in rewards)
        return (
            f"{in_row} groups in a row had one reward for all of their answers, though not each the same, and were "
            f"dropped (algorithm.filter_zero_variance). The newest had {newest}. The learner waits for groups whose "
            "answers differ in reward: more do with a larger rollout.group_size, a higher rollout.temperature or "
            "another data set"
        )

    def _warning(self, reward: float) -> str:
        groups = [group for group in self._groups if all(episode.reward == reward for episode in group[1])]
        answers = [(prompt, episode) for prompt, group in groups[-self._limit :] for episode in group]
        cut = sum(episode.rows[-1].finish_reason == "length" for _, episode in answers)
        found = [self._has_answer(prompt, episode.answer) for prompt, episode in answers]
        parts = [f"{cut / len(answers):.0%} were cut off by a limit on tokens (rollout.max_response_tokens) or turns"]
        in_trouble = [episode for _, episode in answers if episode.end in _TROUBLES]
        for end, words in _TROUBLES.items():
            if number := sum(episode.end == end for episode in in_trouble):
                parts.append(f"{number / len(answers):.0%} {words} (episode/end_{end})")
        if None not in found:
            parts.append(f"in {found.count(False) / len(answers):.0%} the reward found no answer")
        if 2 * len(in_trouble) > len(answers):
            newest = f"The newest of those ended so: {in_trouble[-1].error}"
        else:
            answer = next(episode.answer for _, episode in reversed(answers) if episode.end not in _TROUBLES)
            newest = f"The newest one ends: {answer[-SHOWN_CHARACTERS:]!r}"
        goes_on = self._ends_after and not self.has_only_errors
        until = f" The run goes on, and ends after {self._ends_after} in a row." if goes_on else ""
        *others, last = parts
        told = f"{', '.join(others)}, and {last}" if others else last
        return (
            f"{self._limit} groups in a row had the same reward, {reward:g}, for every answer: they have nothing to "
            f"teach.{until} Of their last {len(answers)} answers {told}. {newest}"
        )
