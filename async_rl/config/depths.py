"""Converts between a depth (staleness.depth) and its number of slots, and checks that there are enough."""

from __future__ import annotations

import math
from typing import Literal

from async_rl.config.check import check


def slots_at(depth: float, fresh_per_step: int) -> int:
    """Return the number of groups that may hold a slot at once at a depth: (depth + 1) * fresh_per_step, rounded up."""
    return math.ceil((depth + 1) * fresh_per_step)


def depth_at(slots: int, fresh_per_step: int) -> float:
    """Return the largest depth, in quarters, that needs no more than so many slots."""
    return (4 * slots // fresh_per_step - 4) / 4


def depth_of_slots(fewest: int, fresh_per_step: int) -> float:
    """Return the smallest depth, in quarters, with at least `fewest` slots, as `depth_at` names it."""
    depth = depth_at(fewest, fresh_per_step)
    if slots_at(depth, fresh_per_step) >= fewest:
        return depth
    return depth_at(slots_at(depth + 0.25, fresh_per_step), fresh_per_step)


def check_slots(
    depth: float | Literal["max", "auto"], slots: int, fresh_per_step: int, prompts_per_step: int, every_steps: int
) -> None:
    """Check that there are slots for all batches between two pushes, without which the learner would wait for ever."""
    needed, largest_every = every_steps * prompts_per_step, slots // prompts_per_step
    limit = "staleness.max" if isinstance(depth, str) else "staleness.depth"
    check(
        slots >= needed, f"({limit} + 1) * ceil(buffer.fresh_fraction * learner.prompts_per_step)",
        slots, f"at least weight_sync.every_steps * learner.prompts_per_step = {needed}",
        f"Otherwise the learner waits for ever. Set {limit} >= {-(-needed // fresh_per_step) - 1}"
        + (f" or weight_sync.every_steps <= {largest_every}." if largest_every else "."),
    )
