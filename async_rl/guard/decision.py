"""Decides from the metrics of a run whether its reward is being over-optimised, and to which version to go back.

    gold rewards decide        trouble: one of their signals is beyond its limit
    they do not                trouble: signals of two kinds are beyond their limits at once

Gold rewards decide if three evaluations have them, the newest of these was made lately, and one of their signals is
known: labels may stop coming, and a rule that finds all answers equal tells nothing.

It acts on nothing: async_rl/driver/run_guard.py does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from async_rl.config.guard import WINDOWS_BACK, GuardConfig
from async_rl.guard.signals import (
    EVALUATIONS,
    GOLD,
    SIGNALS,
    GoldEvaluation,
    Values,
    gold_evaluation,
    gold_free_signals,
    gold_signals,
    mean_of,
    smoothed,
)

START_EPISODES = 64
"""The first steps with so many episodes together are the start, with which later ones are compared."""
KINDS = 2
"""Without gold rewards, the number of kinds of signals that must be beyond their limits at once."""
LATELY = 2
"""Gold rewards are told no more once they are older than so many times the steps that the newest evaluations span."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The signals of a version, and what they mean."""

    version: int
    values: Mapping[str, float]
    """The signals that were measured, by name."""
    beyond: tuple[str, ...]
    """The signals beyond their limits."""
    new: tuple[str, ...]
    """The signals among these that were within their limits when they were measured last."""
    is_trouble: bool
    """Whether the reward is being over-optimised."""
    back_to: int
    """The version before the trouble."""

    def text(self, config: GuardConfig, names: Iterable[str]) -> str:
        """Return the signals `names` as a sentence for people, with their limits."""
        told = []
        for name in names:
            signal = SIGNALS[name]
            side = "at least" if signal.is_floor else "at most"
            told.append(
                f"{signal.text.format(self.values[name])} (guard.{name}_limit: {side} {signal.limit(config):g})"
            )
        return "; ".join(told)


class Guard:
    """Takes the metrics of steps and evaluations in the order in which they end, and finds trouble.

    Args:
        accepted: signals that the user has accepted; they are measured and make no trouble.
    """

    def __init__(self, config: GuardConfig, accepted: Iterable[str] = ()) -> None:
        self._config = config
        self.accepted = set(accepted)
        self._start: list[Values] = []
        self._window: list[Values] = []
        """The steps since the last multiple of guard.every_steps."""
        self._rule_correlations = (0.0, 0)
        """Sum and number of guard/rule_correlation in the steps since the last evaluation with gold rewards."""
        self._gold: list[GoldEvaluation] = []
        self._beyond: set[str] = set()
        self._newest = 0

    def add(self, version: int, values: Values) -> Finding | None:
        """Take the metrics of a step, of an evaluation, or of both; return what they mean, if signals are measured."""
        measured: dict[str, float] = {}
        if "batch/episodes" in values:
            measured |= self._add_step(version, values)
        total, number = self._rule_correlations
        if evaluation := gold_evaluation(version, values, total / number if number else math.nan):
            # a resumed run makes the evaluation of its checkpoint's version again
            self._gold = [*(each for each in self._gold if each.version < version), evaluation]
            self._rule_correlations = (0.0, 0)
            measured |= gold_signals(self._gold)
        return self._find(version, measured) if measured else None

    def needed(self) -> list[int]:
        """Return the versions to which the guard may go back later; their checkpoints must be kept."""
        means = smoothed(self._gold)
        best = [max(means, key=lambda each: each[1])[0]] if means else []
        evaluated = [each.version for each in self._gold[-WINDOWS_BACK - 1 :]]
        return sorted({*best, *evaluated, *self._windows})

    @property
    def back_to(self) -> int:
        """The version before the trouble, if there is some now: the best by gold rewards, if they decide, else one some
        windows ago."""
        if self._gold_decides:
            return max(smoothed(self._gold), key=lambda each: each[1])[0]
        return self._windows[0]

    @property
    def _windows(self) -> list[int]:
        """The versions at the ends of the newest windows, in order."""
        every = self._config.every_steps
        last = self._newest // every * every
        return [last - number * every for number in range(WINDOWS_BACK, -1, -1)]

    @property
    def _gold_decides(self) -> bool:
        if not gold_signals(self._gold):
            return False
        newest = self._gold[-1].version
        return self._newest - newest <= LATELY * (newest - self._gold[-EVALUATIONS].version)

    def _add_step(self, version: int, values: Values) -> dict[str, float]:
        self._newest = version
        if sum(step["batch/episodes"] for step in self._start) < START_EPISODES:
            self._start.append(values)
        self._window.append(values)
        if (correlation := values.get("guard/rule_correlation")) is not None:
            total, number = self._rule_correlations
            self._rule_correlations = total + correlation, number + 1
        if version % self._config.every_steps:
            return {}
        window, self._window = self._window, []
        return gold_free_signals(mean_of(window), mean_of(self._start))

    def _find(self, version: int, measured: Mapping[str, float]) -> Finding:
        config = self._config
        beyond = [name for name, value in measured.items() if SIGNALS[name].is_beyond(value, config)]
        new = [name for name in beyond if name not in self._beyond]
        self._beyond = (self._beyond - measured.keys()) | set(beyond)
        kinds = {SIGNALS[name].kind for name in beyond if name not in self.accepted}
        is_trouble = GOLD in kinds if self._gold_decides else len(kinds) >= KINDS
        return Finding(version, measured, tuple(beyond), tuple(new), is_trouble, self.back_to)
