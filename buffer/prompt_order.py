"""The order of a run's training prompts: which question each prompt index stands for, as a pure function of the seed.

Workers make prompts by it, and the buffer knows by it which question a group was about (task.difficulty).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

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
