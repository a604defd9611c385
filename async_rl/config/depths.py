"""Converts between a depth (staleness.depth) and its number of slots, and says how many slots a run may have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from async_rl.config.check import check


def slots_at(depth: float, fresh_per_step: int) -> int:
    """Return the number of groups that may hold a slot at once at a depth: (depth + 1) * fresh_per_step, rounded up."""
    return math.ceil((depth + 1) * fresh_per_step)


def depth_at(slots: int, fresh_per_step: int) -> float:
    """Return the largest depth, in quarters, that needs no more than so many slots."""
    return (4 * slots // fresh_per_step - 4) / 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimits:
    """The smallest and the largest number of slots of a run; buffer/staleness.py says why. There the fields are B, F,
    E, buffer.max_uses and M.
    """

    prompts_per_step: int
    fresh_per_step: int
    every_steps: int
    max_uses: int
    max_staleness: int

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
    def most(self) -> int:
        """The largest number of slots with which the bound is kept: (M + 1) F."""
        return (self.max_staleness + 1) * self.fresh_per_step

    @property
    def smallest_depth(self) -> float:
        """The smallest depth, in quarters, that has the fewest slots."""
        return max(0.0, (4 * (self.fewest - 1) // self.fresh_per_step - 3) / 4)

    def at(self, depth: float) -> int:
        return slots_at(depth, self.fresh_per_step)

    def is_enough(self, depth: float) -> bool:
        """Return whether a depth has at least the fewest slots."""
        return self.at(depth) >= self.fewest

    def allowed(self, slots: int) -> int:
        """Return the number of slots nearest to `slots` that a run may have."""
        return min(max(slots, self.fewest), self.most)


def resumed_slots(buffer: Mapping[str, Any], limits: SlotLimits, start: int) -> int:
    """Return the number of slots with which a run that moves them goes on: those of the checkpoint's depth.

    Args:
        buffer: the buffer's part of the checkpoint. If it does not say of which run its slots are, they are taken.
        limits: those of the run now, whose batches may have another size.
        start: the number at the start of a run, which is taken if the saved run did not move its slots.
    """
    slots, fresh_per_step = buffer["scalars"]["slots"], buffer.get("fresh_per_step", limits.fresh_per_step)
    if not buffer.get("moves_slots", True):
        return start
    if fresh_per_step != limits.fresh_per_step:
        slots = limits.at(depth_at(slots, fresh_per_step))
    return limits.allowed(slots)


def check_slots(depth: float | Literal["max", "auto"], slots: int, limits: SlotLimits) -> None:
    """Check that there are slots for all batches between two pushes, without which the learner would wait for ever."""
    needed, largest_every = limits.between_pushes, slots // limits.prompts_per_step
    limit = "staleness.max" if isinstance(depth, str) else "staleness.depth"
    check(
        slots >= needed, f"({limit} + 1) * ceil(buffer.fresh_fraction * learner.prompts_per_step)",
        slots, f"at least weight_sync.every_steps * learner.prompts_per_step = {needed}",
        f"Otherwise the learner waits for ever. Set {limit} >= {-(-needed // limits.fresh_per_step) - 1}"
        + (f" or weight_sync.every_steps <= {largest_every}." if largest_every else "."),
    )
