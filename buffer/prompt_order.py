"""The order of a run's training prompts, a pure function of the seed, and the streaks of prompts (task.difficulty).

The order maps each prompt index to a question. Workers make prompts by it, and the buffer finds the question of a group
by it. buffer/difficulty.py skips prompts by their streaks.
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
"""The most prompts of all sources, and of an epoch. An epoch's order takes 8 bytes of memory a prompt: 2 GiB for the
EPOCHS_KEPT epochs that a process keeps, and 4 GiB while it shuffles another one."""


class PromptOrder:
    """Maps the prompt indices 0, 1, 2, ... to the positions of questions. The indices have no end.

    Positions number the questions of all sources, one source after the other. An epoch takes the next `per_epoch`
    questions of each source, in a newly shuffled order unless `shuffles` is false.

    Args:
        sources: (size, per_epoch) of each source.
    """

    def __init__(self, sources: Sequence[tuple[int, int]], seed: int, *, shuffles: bool) -> None:
        self.sources = tuple(sources)
        self.num_prompts = sum(per_epoch for _, per_epoch in self.sources)
        """Number of prompts in an epoch."""
        self._seed = seed
        self._shuffles = shuffles
        self._of_epoch = lru_cache(maxsize=EPOCHS_KEPT)(self._positions)

    def position(self, index: int) -> int:
        """Return the position of the question that prompt `index` asks."""
        epoch, place = divmod(index, self.num_prompts)
        return int(self._of_epoch(epoch)[place])

    def _positions(self, epoch: int) -> npt.NDArray[np.int64]:
        """Return the positions of the questions of one epoch, in the epoch's order."""
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
    """The streak of each prompt that has had a group (buffer/difficulty.py), and the numbers of skipped prompts.

    `restore` fills empty records from the results of `scalars` and `streaks`.

    Args:
        record: called with (position, streak) for each group that arrives, and with (position, None) when a prompt's
            streak is deleted.
    """

    def __init__(self, record: Callable[[int, int | None], None] | None = None) -> None:
        self._record = record
        self.streaks: dict[int, int] = {}
        """[position of the question] its streak."""
        self.sources: list[list[int]] = []
        """[size, prompts per epoch] of each source of prompts; [] until a worker sends them. Positions count through
        the sources.
        """
        self.skipped: Counter[str] = Counter()

    @property
    def num_per_epoch(self) -> int:
        """Number of prompts in an epoch; 0 until a worker sends the sources."""
        return sum(per_epoch for _, per_epoch in self.sources)

    def add(self, position: int, streak: int | None) -> None:
        """Set the streak of the prompt at this position; None deletes it."""
        if streak is None:
            del self.streaks[position]
        else:
            self.streaks[position] = streak
        if self._record:
            self._record(position, streak)

    def learn(self, sources: list[list[int]]) -> None:
        """Set the sources of prompts. If they have changed, delete all streaks: they are of other questions."""
        if self.sources != sources:
            self.sources = sources
            for position in [*self.streaks]:
                self.add(position, None)

    def metrics(self) -> dict[str, float]:
        """Return the numbers of skipped prompts and of prompts with a streak; {} before the first group arrives."""
        if not self.streaks:
            return {}
        return {
            "difficulty/skipped_solved": float(self.skipped["solved"]),
            "difficulty/skipped_unsolved": float(self.skipped["unsolved"]),
            "difficulty/prompts_seen": float(len(self.streaks)),
        }

    def scalars(self) -> dict[str, Any]:
        """Return the sources and the numbers of skipped prompts as plain values for JSON."""
        return {"sources": self.sources, "skipped": dict(self.skipped)}

    def restore(self, scalars: Mapping[str, Any], streaks: Iterable[tuple[int, int]]) -> None:
        """Fill these empty records from the `scalars` and the (position, streak) pairs of other records."""
        self.sources = [list(source) for source in scalars["sources"]]
        self.skipped = Counter(scalars["skipped"])
        self.streaks.update(streaks)
