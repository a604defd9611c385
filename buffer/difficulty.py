"""Skips prompts by difficulty (task.difficulty). Without that setting a run does not load this module.

Prompts that are always or never solved are skipped, by a record of each prompt. The record is a
streak: how many of the prompt's last groups in a row had the same reward for all answers. It is positive if that reward
counts as right (eval.correct_threshold), negative if not, and 0 after a group with different rewards. When the prompt's
turn in an epoch comes, it is taken with

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


def chance(streak: int, solved: float, unsolved: float) -> float:
    """Return the chance with which a prompt is taken, given the lowest chances of solved and unsolved ones."""
    return max(solved if streak > 0 else unsolved, 0.5 ** abs(streak))


class PromptDraw:
    """Takes or skips prompts when their turn comes. Which ones follows from run.seed and the records alone.

    Only the workers read the task, so they send the sources of prompts: `learn` comes before `take`, or `restore` in a
    buffer that was started again.
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
        """Set the sources of prompts, (size, per epoch) of each, as a worker has read them.

        Raises:
            WireError: another worker has other sources.
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
        """Set the sources of prompts that this run's buffer had before it was started again."""
        if records.sources:
            self.learn([(size, per_epoch) for size, per_epoch in records.sources], records)

    def take(self, index: int, records: PromptRecords) -> int:
        """Return the first prompt index from `index` on that is not skipped; count those that are."""
        assert self._order is not None, "learn is called first"
        while True:
            streak = records.streaks.get(self._order.position(index), 0)
            epoch, place = divmod(index, self._order.num_prompts)
            if self._of_epoch(epoch)[place] < chance(streak, self._least.solved, self._least.unsolved):
                return index
            records.skipped["solved" if streak > 0 else "unsolved"] += 1
            index += 1

    def arrived(self, prompt_index: int, arrival: Arrival, records: PromptRecords) -> None:
        """Record a group that has arrived."""
        assert self._order is not None, "learn is called first"
        position = self._order.position(prompt_index)
        before, is_right = records.streaks.get(position, 0), self._is_right(arrival.reward)
        records.add(position, next_streak(before, is_flat=arrival.equal_rewards, is_right=is_right))

    def _draws(self, epoch: int) -> npt.NDArray[np.float64]:
        assert self._order is not None, "learn is called first"
        return np.random.default_rng([self._seed, epoch, 0, 1]).random(self._order.num_prompts)
