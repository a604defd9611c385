"""Converts a depth (staleness.depth) to its number of slots, and says how few slots a run may have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from async_rl.base.config.check import check


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimits:
    """The number of slots of a depth, and the smallest number of a run; buffer/staleness.py says why.

    The first three fields are B, F and E there.
    """

    prompts_per_step: int
    fresh_per_step: int
    every_steps: int
    max_uses: int

    @property
    def between_pushes(self) -> int:
        """The number of groups that the learner trains between two pushes: E B."""
        return self.every_steps * self.prompts_per_step

    @property
    def fewest(self) -> int:
        """The smallest number of slots with which the learner never waits for ever: E B. Where groups are used again
        also 2 F, so that there are fresh ones to begin the next batch with while one is trained.
        """
        return max(self.between_pushes, 2 * self.fresh_per_step * (self.max_uses > 1))

    @property
    def smallest_depth(self) -> float:
        """The smallest depth, in quarters, that has the fewest slots."""
        return max(0.0, (4 * (self.fewest - 1) // self.fresh_per_step - 3) / 4)

    def at(self, depth: float) -> int:
        """Return the number of groups that may hold a slot at once at a depth: (depth + 1) F, rounded up."""
        return math.ceil((depth + 1) * self.fresh_per_step)

    def is_enough(self, depth: float) -> bool:
        """Return whether a depth has at least the fewest slots."""
        return self.at(depth) >= self.fewest


def check_slots(depth: float | Literal["max"], slots: int, limits: SlotLimits) -> None:
    """Check that there are slots for all batches between two pushes, without which the learner would wait for ever."""
    needed, largest_every = limits.between_pushes, slots // limits.prompts_per_step
    limit = "staleness.max" if isinstance(depth, str) else "staleness.depth"
    check(
        slots >= needed, f"({limit} + 1) * ceil(buffer.fresh_fraction * learner.prompts_per_step)",
        slots, f"at least weight_sync.every_steps * learner.prompts_per_step = {needed}",
        f"Otherwise the learner waits for ever. Set {limit} >= {-(-needed // limits.fresh_per_step) - 1}"
        + (f" or weight_sync.every_steps <= {largest_every}." if largest_every else "."),
    )
