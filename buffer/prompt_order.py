"""The order of a run's training prompts, a pure function of the seed, and the skipping of prompts by difficulty.

The order says which question each prompt index stands for. Workers make prompts by it, and the buffer knows by it which
question a group was about.

With task.difficulty, prompts that are always or never solved are skipped, by a record of each prompt. The record is a
streak: how many of the prompt's last groups in a row had the same reward for all answers. It is positive if that reward
counts as right (eval.correct_threshold), negative if not, and 0 after a group with different rewards. When the prompt's
turn in an epoch comes, it is taken with

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
from buffer.stored_group import Arrival

EPOCHS_KEPT = 4
MAX_PROMPTS = 2**26
"""The most prompts of an epoch, so that their order has room in memory, 8 bytes a prompt: the EPOCHS_KEPT epochs that a
process keeps take 2 GiB then, and 4 GiB while another one is shuffled."""


class PromptOrder:
    """Maps prompt indices, from 0 without end, to the positions of questions: 0 to the sum of all sizes less 1.

    An epoch has `per_epoch` questions of each source of `size` questions, the next ones in each epoch. It is in another
    order each time, unless `shuffles` is false.

    Args:
        sources: (size, per_epoch) of each source.
    """

    def __init__(self, sources: Sequence[tuple[int, int]], seed: int, *, shuffles: bool) -> None:
        self.sources = tuple(sources)
        self.num_prompts = sum(per_epoch for _, per_epoch in self.sources)
        """The number of prompts in an epoch."""
        self._seed = seed
        self._shuffles = shuffles
        self._of_epoch = lru_cache(maxsize=EPOCHS_KEPT)(self._positions)

    def position(self, index: int) -> int:
        """Return the position of the question that prompt `index` asks."""
        epoch, place = divmod(index, self.num_prompts)
        return int(self._of_epoch(epoch)[place])

    def _positions(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the positions of an epoch in its order."""
        parts = []
        start = 0
        for number, (size, count) in enumerate(self.sources):
            if count == size:
                parts.append(start + np.arange(size))
            else:
                cycles, places = np.divmod(epoch * count + np.arange(count), size)
                for cycle in np.unique(cycles):
                    order = np.arange(size)
                    if self._shuffles:
                        order = np.random.default_rng([self._seed, number, cycle]).permutation(size)
                    parts.append(start + order[places[cycles == cycle]])
            start += size
        positions = np.concatenate(parts)
        if not self._shuffles:
            return positions
        shuffled: npt.NDArray[np.int64] = positions[
            np.random.default_rng([self._seed, epoch]).permutation(self.num_prompts)
        ]
        return shuffled


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
