"""The error for settings that can't work, and the function that checks a setting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from async_rl.base.errors import ConfigError


class Problem(NamedTuple):
    """One setting that can't work. Its line in the error message is `text`, the place where `key` was set, and `rest`.
    """

    key: str
    text: str
    rest: str = ""


class SettingsError(ConfigError):
    """Raised for settings that can't work. The message has one line for each of `problems`.

    Args:
        places: where each key was set (`run.yaml:7`, `override`), by key. Keys with default values are missing.
    """

    def __init__(self, problems: Sequence[Problem], places: Mapping[str, str] | None = None) -> None:
        super().__init__(problems, places)
        self.problems = problems
        self.places = places or {}

    def __str__(self) -> str:
        return "\n".join(map(self._line, self.problems))

    def _line(self, problem: Problem) -> str:
        place = self.places.get(problem.key.partition("[")[0])
        return problem.text + (f" ({place})" if place else "") + problem.rest


def check(condition: bool, key: str, got: object, allowed: str, hint: str = "") -> None:
    """Raise an error about one setting if `condition` is false.

    Args:
        hint: what to do instead.

    Raises:
        SettingsError: the message is "`key` must be `allowed`, got `got`", followed by the hint.
    """
    if not condition:
        raise SettingsError([Problem(key, f"{key} must be {allowed}, got {got!r}", f". {hint}" if hint else "")])


def either(names: Sequence[str]) -> str:
    """Join the names as `a, b or c`, for messages."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
