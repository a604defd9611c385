"""How a section refuses a value."""

from __future__ import annotations

import math
from dataclasses import is_dataclass

from async_rl.errors import ConfigError

MAY_BE_INFINITE = (
    "algorithm.clip.high", "algorithm.correction.cap", "algorithm.correction.masks.token",
    "algorithm.correction.masks.sequence", "algorithm.correction.masks.geometric", "learner.grad_clip",
)
"""Bounds, which .inf turns off."""


def check(condition: bool, key: str, got: object, allowed: str, hint: str = "") -> None:
    """
    Raises:
        ConfigError: `condition` does not hold; names the key, the value got, what is allowed and what to do.
    """
    if not condition:
        raise ConfigError(f"{key} must be {allowed}, got {got!r}" + (f". {hint}" if hint else ""))


def check_finite(settings: object, section: str = "") -> None:
    """Of all numbers in the dataclass `settings` and its sections, whose keys begin with `section`.

    Raises:
        ConfigError: one is infinite, and none of MAY_BE_INFINITE, or not a number.
    """
    for name, value in vars(settings).items():
        key = section + name
        if is_dataclass(value):
            check_finite(value, f"{key}.")
        elif key not in MAY_BE_INFINITE:
            numbers = [item for item in (value if isinstance(value, tuple) else (value,)) if isinstance(item, float)]
            hint = f"Only {', '.join(MAY_BE_INFINITE)} may be .inf: give a number."
            check(all(map(math.isfinite, numbers)), key, value, "finite", hint)
