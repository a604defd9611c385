"""The order of a run's training prompts, a pure function of the seed, and the records of their difficulty.

The order says which question each prompt index stands for. Workers make prompts by it, and the buffer knows by it which
question a group was about.

With task.difficulty the buffer also keeps a record of each prompt, by which difficulty.py skips prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

EPOCHS_KEPT = 4
MAX_PROMPTS = 2**26
"""The most prompts of an epoch, so that their order has room in memory, 8 bytes a prompt: the EPOCHS_KEPT epochs that a
process keeps take 2 GiB then, and 4 GiB while another one is shuffled."""


class PromptOrder:
    """Maps prompt indices 0, 1, 2, ... without end to positions of questions.

    Positions number the questions of all sources, one source after the other. An epoch takes the next `per_epoch`
    questions of each source. It is shuffled anew each time, unless `shuffles` is false.

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
