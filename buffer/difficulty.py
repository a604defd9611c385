"""Skips prompts that are always or never solved (task.difficulty). Runs without that setting don't load this module.

Each prompt has a streak: how many of its last groups in a row had one reward for all answers. The streak is positive if
that reward counts as right (eval.correct_threshold), negative if not, and 0 after a group with different rewards. When
the prompt's turn in an epoch comes, it is taken with

    chance = max(least, 2^-|streak|),    least = task.difficulty.solved or .unsolved, by the sign of the streak,

and else skipped. One group with different rewards makes the chance 1 again.
"""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from async_rl.base.config import Config
from buffer.prompt_order import PromptOrder, PromptRecords
from buffer.store_state import Arrival


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
    return sign * (max(0, sign * streak) + 1)


def chance(streak: int, solved: float, unsolved: float) -> float:
    """Return the probability that a prompt is taken and not skipped: 2 to the power of minus |streak|.

    It is at least `solved` after right answers (a positive streak), else at least `unsolved`.
    """
    return max(solved if streak > 0 else unsolved, 0.5 ** abs(streak))


class PromptDraw:
    """Takes or skips each prompt when its turn comes, as run.seed and the prompts' streaks determine.

    Only workers read the task. So the sources of the prompts, which a worker sends, must be in the records.
    """

    def __init__(self, config: Config) -> None:
        self._least, self._is_right, seed = config.task.difficulty, config.eval.is_right, config.run.seed
        self._order = lru_cache(maxsize=1)(partial(PromptOrder, seed=seed, shuffles=config.task.shuffle))
        self._draws = lru_cache(maxsize=4)(partial(_draws, seed))

    def _order_of(self, records: PromptRecords) -> PromptOrder:
        return self._order(tuple((size, per_epoch) for size, per_epoch in records.sources))

    def take(self, index: int, records: PromptRecords) -> int:
        """Return the first prompt index >= `index` that is not skipped. Counts the skipped ones in `records`."""
        order = self._order_of(records)
        while True:
            streak = records.streaks.get(order.position(index), 0)
            epoch, place = divmod(index, order.num_prompts)
            drawn = self._draws(epoch, order.num_prompts)[place]
            if drawn < chance(streak, self._least.solved, self._least.unsolved):
                return index
            records.skipped["solved" if streak > 0 else "unsolved"] += 1
            index += 1

    def arrived(self, prompt_index: int, arrival: Arrival, records: PromptRecords) -> None:
        """Update the streak of a prompt in `records` after a group of it has arrived."""
        position = self._order_of(records).position(prompt_index)
        before, is_right = records.streaks.get(position, 0), self._is_right(arrival.reward)
        records.add(position, next_streak(before, is_flat=arrival.equal_rewards, is_right=is_right))


def _draws(seed: int, epoch: int, size: int) -> npt.NDArray[np.float64]:
    return np.random.default_rng([seed, epoch, 0, 1]).random(size)
