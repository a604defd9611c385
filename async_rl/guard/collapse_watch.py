"""Follows the metrics of a run, step by step, and finds the steps at which its alarms begin and end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from async_rl.config.alarms import AlarmsConfig
from async_rl.guard.collapse import COLLAPSE_SIGNALS, SignalValue, Values, collapse_signals, mean_over, moved_weights


@dataclass(frozen=True, slots=True)
class CollapseFinding:
    """The signals of a collapse after a step."""

    version: int
    measured: Mapping[str, SignalValue]
    beyond: tuple[str, ...]
    """The signals beyond their limits."""
    new: tuple[str, ...]
    """The signals among these that were within their limits before."""
    back_to: int
    """The newest version of which it is known that it was at the best reward."""

    @property
    def is_serious(self) -> bool:
        """Whether an alarm is new that is more than a caution."""
        return any(not COLLAPSE_SIGNALS[name].is_caution for name in self.new)

    def text(self, name: str) -> str:
        """Return a signal in words."""
        measured = self.measured[name]
        facts = {"value": measured.value, "start": measured.start, "now": measured.now, "best": measured.best}
        return COLLAPSE_SIGNALS[name].text.format(**facts)


class CollapseWatch:
    """Takes the metrics of the steps of a run in order.

    Args:
        right_above: the reward of a right answer, eval.right_above.
    """

    def __init__(self, config: AlarmsConfig, right_above: float) -> None:
        self._config = config
        self._right_above = right_above
        self._start: list[Values] = []
        self._window: deque[Values] = deque(maxlen=config.window_steps)
        self._changes: list[float] = []
        self._best = -math.inf
        self._beyond: set[str] = set()
        self.back_to = 0
        """The newest version that is known to have been at the best reward: it has sampled the last batch of the window
        with the best mean reward, which must not end in a fall."""
        self.next_back_to = 0
        """The oldest version that later steps may show to be at the best reward, if they are as stale as this one."""

    def add(self, version: int, values: Values) -> CollapseFinding | None:
        """Take the metrics of a step; return the signals, once there is a whole window."""
        self.next_back_to = max(0, version - math.ceil(values.get("staleness/mean", 0.0)))
        if self._window:
            self._changes += moved_weights(self._window[-1])
        before = mean_over(self._window) if len(self._window) == self._config.window_steps else {}
        self._window.append(values)
        if len(self._start) < self._config.window_steps:
            self._start.append(values)
        if len(self._window) < self._config.window_steps:
            return None
        now = mean_over(self._window)
        is_best = now.get("reward/mean", -math.inf) > self._best
        self._best = now["reward/mean"] if is_best else self._best
        start = mean_over(self._start)
        measured = collapse_signals(tuple(self._window), before, start, self._best, self._right_above, self._changes)
        beyond = tuple(
            name for name, each in measured.items() if COLLAPSE_SIGNALS[name].is_beyond(each.value, self._config)
        )
        if is_best and "reward" not in beyond:
            self.back_to = max(0, self.next_back_to - 1)
        new = tuple(name for name in beyond if name not in self._beyond)
        self._beyond = set(beyond)
        return CollapseFinding(version, measured, beyond, new, self.back_to)
