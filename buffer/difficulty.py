"""Skips prompts that are always or never solved (task.difficulty), by a record of each prompt.

The record is a streak: how many of the prompt's last groups in a row had the same reward for all answers. It is
positive if that reward counts as right (eval.correct_threshold), negative if not, and 0 after a group with different
rewards. When the prompt's turn in an epoch comes, it is taken with

    chance = max(least, 2^-|streak|),    least = task.difficulty.solved or .unsolved, by the sign of the streak,

and else skipped. One group with different rewards makes the chance 1 again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.base.config import Config
from async_rl.base.errors import WireError
from buffer.prompt_order import PromptOrder
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


class PromptRecords:
    """The streak of each prompt that has had a group, and the numbers of skipped prompts.

    It is part of the buffer's state: `restore` makes it again from the results of `scalars` and `streaks`.

    Args:
        record: is called with (position, streak) of each group that arrives, and with (position, None) of a prompt
            that is forgotten.
    """

    def __init__(self, record: Callable[[int, int | None], None] | None = None) -> None:
        self._record = record
        self.streaks: dict[int, int] = {}
        """[position of the question] its streak."""
        self.sources: list[list[int]] = []
        """[size, per epoch] of each source of prompts, which number the positions; [] until a worker sends it."""
        self.skipped: Counter[str] = Counter()

    @property
    def num_per_epoch(self) -> int:
        """The number of prompts in an epoch; 0 until a worker sends the sources."""
        return sum(per_epoch for _, per_epoch in self.sources)

    def add(self, position: int, streak: int | None) -> None:
        """Set the streak of a prompt; None forgets it."""
        if streak is None:
            del self.streaks[position]
        else:
            self.streaks[position] = streak
        if self._record:
            self._record(position, streak)

    def learn(self, sources: list[list[int]]) -> None:
        """Set the sources of prompts. If they have changed, the streaks are forgotten: they are of other questions."""
        if self.sources != sources:
            self.sources = sources
            for position in [*self.streaks]:
                self.add(position, None)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of prompts skipped and seen since the start; {} before the first group."""
        if not self.streaks:
            return {}
        return {
            "difficulty/skipped_solved": float(self.skipped["solved"]),
            "difficulty/skipped_unsolved": float(self.skipped["unsolved"]),
            "difficulty/prompts_seen": float(len(self.streaks)),
        }

    def scalars(self) -> dict[str, Any]:
        """Return all but the streaks as plain values that JSON can hold."""
        return {"sources": self.sources, "skipped": dict(self.skipped)}

    def restore(self, scalars: Mapping[str, Any], streaks: Iterable[tuple[int, int]]) -> None:
        """Fill empty records with the `scalars` and `streaks` of others."""
        self.sources = [list(source) for source in scalars["sources"]]
        self.skipped = Counter(scalars["skipped"])
        self.streaks.update(streaks)


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
