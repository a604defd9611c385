"""Draws the prompts of new groups by task.difficulty; without it the store takes every prompt in its turn."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from async_rl.config import Config
from async_rl.errors import WireError
from buffer.difficulty import Kind, PromptRecords, chance, kind_of, next_streak
from buffer.prompt_order import PromptOrder
from buffer.stored_group import Arrival

MEMORY_BATCHES = 8
"""After so many batches' worth of groups, a group counts 1 / e in the mean rewards that show the bias."""


class PromptDraw:
    """Takes or skips prompts when their turn comes, by the records of their questions.

    Which prompts are skipped follows from run.seed and the records alone. It has no state of its own but the order of
    prompts, which only the workers know, because they read the task: `learn` must be called before `take`, or `restore`
    in a buffer that was started again.
    """

    def __init__(self, config: Config) -> None:
        difficulty = config.task.difficulty
        self._least: dict[Kind, float] = {
            "solved": difficulty.solved, "unsolved": difficulty.unsolved, "mixed": 1.0,
        }
        self._seed = config.run.seed
        self._shuffles = config.task.shuffle
        self._is_right = config.eval.is_right
        self._memory_groups = MEMORY_BATCHES * config.learner.prompts_per_step
        self._order: PromptOrder | None = None
        self._of_epoch = lru_cache(maxsize=4)(self._draws)

    @property
    def knows_order(self) -> bool:
        return self._order is not None

    def learn(self, sources: Sequence[tuple[int, int]], records: PromptRecords) -> None:
        """Take in the sources of prompts, (size, per epoch) of each, as a worker has read them.

        Records of other sources, from before a resume with another task.path, are forgotten.

        Raises:
            WireError: another worker has other sources.
        """
        told = [list(source) for source in sources]
        if self._order is None:
            records.learn(told)
            self._order = PromptOrder(sources, self._seed, shuffles=self._shuffles)
        elif records.sources != told:
            raise WireError(
                f"sources: got {str(told)[:200]}, allowed {str(records.sources)[:200]}, the numbers of prompts that "
                "another worker has read: with task.difficulty, task.path must hold the same rows on all hosts"
            )

    def restore(self, records: PromptRecords) -> None:
        """Take in the sources of prompts that the workers had told this run's buffer before it was started again."""
        if records.sources:
            self.learn([(size, per_epoch) for size, per_epoch in records.sources], records)

    def take(self, index: int, records: PromptRecords) -> tuple[int, float]:
        """Return (index, chance) of the first prompt from `index` on that is not skipped; count those that are."""
        while True:
            streak = self._streak(index, records)
            with_chance = chance(streak, self._least)
            if self._draw(index) < with_chance:
                return index, with_chance
            records.skipped[kind_of(streak)] += 1
            index += 1

    def chance_of(self, index: int, records: PromptRecords) -> float:
        """Return the chance of a prompt by its record of now: that of a prompt which is granted again, undrawn."""
        return chance(self._streak(index, records), self._least)

    def arrived(self, prompt_index: int, drawn_with: float, arrival: Arrival, records: PromptRecords) -> None:
        """Record a group that has arrived."""
        order = self._known_order()
        position = order.position(prompt_index)
        streak = next_streak(
            records.streaks.get(position, 0), is_flat=arrival.equal_rewards, is_right=self._is_right(arrival.reward)
        )
        records.arrived(position, streak, arrival.reward, drawn_with, self._memory_groups)

    def _streak(self, index: int, records: PromptRecords) -> int:
        return records.streaks.get(self._known_order().position(index), 0)

    def _draw(self, index: int) -> float:
        """Return the number in [0, 1) that decides on prompt `index`: it is skipped with a chance that is not above."""
        epoch, place = divmod(index, self._known_order().num_prompts)
        return float(self._of_epoch(epoch)[place])

    def _draws(self, epoch: int) -> npt.NDArray[np.float64]:
        return np.random.default_rng([self._seed, epoch, 0, 1]).random(self._known_order().num_prompts)

    def _known_order(self) -> PromptOrder:
        assert self._order is not None, "learn is called first"
        return self._order
