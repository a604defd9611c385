"""Rules of a store, and what it learns of a group that arrives."""

from __future__ import annotations

from typing import Any

from buffer.staleness import Rules
from buffer.store_state import Arrival


def plain_rules(max_staleness: int, prompts_per_step: int, **changes: Any) -> Rules:
    fresh = changes.get("fresh_per_step", prompts_per_step)
    sizes = {
        "max_staleness": max_staleness, "prompts_per_step": prompts_per_step, "fresh_per_step": fresh,
        "every_steps": 1, "slots": (max_staleness + 1) * fresh,
    }
    return Rules(**{**sizes, **changes})


def make_arrival(newest_version: int = 0, **changes: Any) -> Arrival:
    fields = {
        "newest_version": newest_version, "response_tokens": 4.0, "reward": 0.5, "equal_rewards": False,
        "duration_s": 1.0,
    }
    return Arrival(**{**fields, **changes})
