"""Skips prompts that are always or never solved (task.difficulty). Runs without that setting don't load this module.

Each prompt has a streak: how many of its last groups in a row had one reward for all answers. The streak is positive if
that reward counts as right (eval.correct_threshold), negative if not, and 0 after a group with different rewards. When
the prompt's turn in an epoch comes, it is taken with

    chance = max(least, 2^-|streak|),    least = task.difficulty.solved or .unsolved, by the sign of the streak,

and else skipped. One group with different rewards makes the chance 1 again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from async_rl.base.config import Config
from async_rl.base.errors import WireError
from buffer.prompt_order import PromptOrder, PromptRecords
from buffer.stored_group import Arrival

_LARGEST_STREAK = 60
"""The longest streak. Longer ones count as this: 2^-60 is below any chance that the configuration allows."""


def next_streak(streak: int, *, is_flat: bool, is_right: bool) -> int:
    """Return a prompt's streak after one more group.

    Args:
        streak: the streak before that group.
        is_flat: whether all answers of the group had one reward.
        is_right: whether that reward counts as right.
    """
    if not is_flat:
        return 0
    sign = 1 if is_right else -1
    return sign * min(_LARGEST_STREAK, max(0, sign * streak) + 1)


def chance(streak: int, solved: float, unsolved: float) -> float:
    """Return the probability that a prompt is taken and not skipped: 2 to the power of minus |streak|.

    It is at least `solved` after right answers (a positive streak), else at least `unsolved`.
    """
    return max(solved if streak > 0 else unsolved, 0.5 ** abs(streak))


class PromptDraw:
    """Takes or skips each prompt when its turn comes, as run.seed and the prompts' streaks determine.

    Only workers read the task. So a worker sends the sources of the prompts, and `learn` comes before the first `take`.
    A restarted buffer calls `restore` instead.
    """

    def __init__(self, config: Config) -> None:
        self._least = config.task.difficulty
        self._seed, self._shuffles, self._is_right = config.run.seed, config.task.shuffle, config.eval.is_right
        self._order: PromptOrder | None = None
        self._of_epoch = lru_cache(maxsize=4)(self._draws)

    @property
    def knows_order(self) -> bool:
        return self._order is not None

    def learn(self, sources: Sequence[tuple[int, int]], records: PromptRecords) -> None:
        """Set the sources of the prompts, a pair (size, prompts per epoch) each. Every worker sends them once.

        The first call also stores them in `records`; the later ones only compare.

        Raises:
            WireError: another worker sent different sources.
        """
        sent = [list(source) for source in sources]
        if self._order is None:
            records.learn(sent)
            self._order = PromptOrder(sources, self._seed, shuffles=self._shuffles)
        elif records.sources != sent:
            raise WireError(
                f"sources: got {str(sent)[:200]}, allowed {str(records.sources)[:200]}, the numbers of prompts of "
                "another worker: with task.difficulty, task.path must hold the same rows on all hosts"
            )

    def restore(self, records: PromptRecords) -> None:
        """After a restart of the buffer, set the sources of prompts from `records`. Does nothing if it has none."""
        if records.sources:
            self.learn([(size, per_epoch) for size, per_epoch in records.sources], records)

    def take(self, index: int, records: PromptRecords) -> int:
        """Return the first prompt index >= `index` that is not skipped. Counts the skipped ones in `records`."""
        assert self._order is not None, "learn is called first"
        while True:
            streak = records.streaks.get(self._order.position(index), 0)
            epoch, place = divmod(index, self._order.num_prompts)
            if self._of_epoch(epoch)[place] < chance(streak, self._least.solved, self._least.unsolved):
                return index
            records.skipped["solved" if streak > 0 else "unsolved"] += 1
            index += 1

    def arrived(self, prompt_index: int, arrival: Arrival, records: PromptRecords) -> None:
        """Update the streak of a prompt in `records` after a group of it has arrived."""
        assert self._order is not None, "learn is called first"
        position = self._order.position(prompt_index)
        before, is_right = records.streaks.get(position, 0), self._is_right(arrival.reward)
        records.add(position, next_streak(before, is_flat=arrival.equal_rewards, is_right=is_right))

    def _draws(self, epoch: int) -> npt.NDArray[np.float64]:
        assert self._order is not None, "learn is called first"
        return np.random.default_rng([self._seed, epoch, 0, 1]).random(self._order.num_prompts)
