"""How a section refuses a value."""

from __future__ import annotations

from async_rl.errors import ConfigError


def check(condition: bool, key: str, got: object, allowed: str, hint: str = "") -> None:
    """
    Raises:
        ConfigError: `condition` does not hold; names the key, the value got, what is allowed and what to do.
    """
    if not condition:
        raise ConfigError(f"{key} must be {allowed}, got {got!r}" + (f". {hint}" if hint else ""))
