"""The rule by which prompts that are always or never solved are sampled less (task.difficulty), and its records.

The record of a prompt is its streak: the number of its last groups in a row in which all answers had one reward, from
which advantages that compare answers learn nothing. It is positive if that reward counts as right (eval.right_above),
negative if not, and 0 after a group with different rewards. When the prompt's turn in an epoch comes, it is taken with

    chance = max(least, 2^-|streak|),    least = task.difficulty.solved or .unsolved, by the sign of the streak,

and else skipped. So no prompt is left out for good: in the mean it is taken in every (1 / least)-th epoch at the
latest, and one group with different rewards makes its chance 1 again.

Groups are biased by this towards prompts that are sometimes solved. Means in which a group counts 1 / chance are not:
in the mean over draws, prompts count in them as often as in epochs without a skip (the estimator of Horvitz and
Thompson, 1952).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

Kind = Literal["solved", "unsolved", "mixed"]
_LARGEST_STREAK = 60
"""Longer streaks count as this one: 2^-60 is below any chance that the configuration allows."""


def next_streak(streak: int, *, is_flat: bool, is_right: bool) -> int:
    """Return a prompt's streak after one more group.

    Args:
        is_flat: whether all answers of the group had one reward.
        is_right: whether that reward counts as right.
    """
    if not is_flat:
        return 0
    sign = 1 if is_right else -1
    return sign * min(_LARGEST_STREAK, max(0, sign * streak) + 1)


def kind_of(streak: int) -> Kind:
    """Return what the last group of a prompt says about it."""
    return "mixed" if streak == 0 else "solved" if streak > 0 else "unsolved"


def chance(streak: int, least: Mapping[Kind, float]) -> float:
    """Return the chance with which a prompt is taken when its turn comes; `least` has the lowest one of each kind."""
    return max(least[kind_of(streak)], 0.5 ** abs(streak))


class PromptRecords:
    """The streak of each prompt of which a group has arrived, the numbers of skipped prompts, and the bias of skipping.

    It is part of the buffer's state: `restore` makes it again from the results of `scalars` and `streaks`.

    Args:
        record: is called with (position, streak) of each group that arrives, and with (position, None) of a prompt
            that is forgotten.
    """

    def __init__(self, record: Callable[[int, int | None], None] | None = None) -> None:
        self._record = record
        self.streaks: dict[int, int] = {}
        """[position of the question] its streak."""
        self._kinds: Counter[Kind] = Counter()
        self.sources: list[list[int]] = []
        """[size, per epoch] of each source of prompts, by which positions are numbered; [] before a worker told."""
        self.skipped: Counter[Kind] = Counter()
        self._sums = {"groups": 0.0, "reward": 0.0, "weight": 0.0, "weighted_reward": 0.0}
        """Fading sums over the groups that arrived; the weight of a group is 1 / chance."""

    def arrived(self, position: int, streak: int, reward: float, drawn_with: float, memory_groups: int) -> None:
        """Record a group that has arrived, after which the prompt at `position` has the streak `streak`.

        Args:
            reward: the mean reward of its answers.
            drawn_with: the chance with which its prompt was taken.
            memory_groups: the number of groups after which a group counts 1 / e in the means of `metrics`.
        """
        self._set(position, streak)
        if self._record:
            self._record(position, streak)
        weight = 1 / drawn_with
        new = {"groups": 1.0, "reward": reward, "weight": weight, "weighted_reward": weight * reward}
        self._sums = {name: total * (1 - 1 / memory_groups) + new[name] for name, total in self._sums.items()}

    @property
    def num_per_epoch(self) -> int:
        """The number of prompts in an epoch; 0 before a worker told."""
        return sum(per_epoch for _, per_epoch in self.sources)

    def learn(self, sources: list[list[int]]) -> None:
        """Take in the sources of prompts. If they are others, the streaks are forgotten: they are of other questions.
        """
        if self.sources == sources:
            return
        self.sources = sources
        if self._record:
            for position in self.streaks:
                self._record(position, None)
        self.streaks.clear()
        self._kinds.clear()

    def metrics(self) -> dict[str, float]:
        """Return the numbers of prompts skipped since the start, shares of prompts by kind, and the bias; or {}."""
        if not self.streaks:
            return {}
        sums, seen = self._sums, len(self.streaks)
        unbiased = sums["weighted_reward"] / sums["weight"] if sums["weight"] else 0.0
        drawn = sums["reward"] / sums["groups"] if sums["groups"] else 0.0
        return {
            "difficulty/skipped_solved": float(self.skipped["solved"]),
            "difficulty/skipped_unsolved": float(self.skipped["unsolved"]),
            "difficulty/prompts_seen": float(seen),
            "difficulty/solved_fraction": self._kinds["solved"] / seen,
            "difficulty/unsolved_fraction": self._kinds["unsolved"] / seen,
            "difficulty/reward_without_skips": unbiased,
            "difficulty/reward_bias": drawn - unbiased,
        }

    def scalars(self) -> dict[str, Any]:
        """Return all but the streaks as plain values that JSON can hold."""
        return {"sources": self.sources, "skipped": dict(self.skipped), "sums": self._sums}

    def restore(self, scalars: Mapping[str, Any], streaks: Iterable[tuple[int, int]]) -> None:
        """Fill empty records with the `scalars` and `streaks` of others."""
        self.sources = [list(source) for source in scalars["sources"]]
        self.skipped = Counter(scalars["skipped"])
        self._sums = dict(scalars["sums"])
        for position, streak in streaks:
            self._set(position, streak)

    def _set(self, position: int, streak: int) -> None:
        before = self.streaks.get(position)
        if before is not None:
            self._kinds[kind_of(before)] -= 1
        self.streaks[position] = streak
        self._kinds[kind_of(streak)] += 1
