"""Converts between a depth (staleness.depth) and the number of slots that it needs."""

from __future__ import annotations

import math


def slots_at(depth: float, fresh_per_step: int) -> int:
    """Return the number of groups that may hold a slot at once at a depth: (depth + 1) * fresh_per_step, rounded up."""
    return math.ceil((depth + 1) * fresh_per_step)


def depth_at(slots: int, fresh_per_step: int) -> float:
    """Return the largest depth, in quarters, that needs no more than so many slots."""
    return (4 * slots // fresh_per_step - 4) / 4
