"""Keeps the alarms of a run: those that the learner has checked at its step, and those of a collapse."""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.config.alarms import AlarmsConfig
from async_rl.guard.collapse import COLLAPSE_SIGNALS, Values
from async_rl.guard.collapse_watch import CollapseFinding, CollapseWatch
from async_rl.seams.doc_pages import doc_page

PAGE = doc_page("not-learning.md")
_KEY = "alarm/"


@dataclass(slots=True)
class _Steps:
    """The steps at which an alarm was on."""

    count: int
    since: int
    """The first of those without a break up to the last one."""
    last: int


class AlarmLog:
    """Takes the metrics of the steps of a run in order, checks the signals of a collapse, and counts all alarms.

    Args:
        right_above: the reward of a right answer, eval.right_above.
    """

    def __init__(self, config: AlarmsConfig, right_above: float) -> None:
        self._watch = CollapseWatch(config, right_above)
        self._new: list[CollapseFinding] = []
        self._newest: CollapseFinding | None = None
        self._steps: dict[str, _Steps] = {}
        self._on: set[str] = set()
        self._over: list[str] = []
        self._version = 0

    @property
    def back_to(self) -> int:
        """The newest version that is known to have been at the best reward."""
        return self._watch.back_to

    @property
    def next_back_to(self) -> int:
        """The oldest version that the next steps may show to be at the best reward."""
        return self._watch.next_back_to

    def add(self, version: int, values: Values) -> dict[str, float]:
        """Take the metrics of a step; return the metrics `alarm/<name>` of the signals of a collapse, 1 or 0 each."""
        finding = self._watch.add(version, values)
        states = {}
        if finding:
            self._newest = finding
            states = {f"{_KEY}{name}": float(name in finding.beyond) for name in finding.measured}
            if finding.new:
                self._new.append(finding)
        for key, value in {**values, **states}.items():
            if key.startswith(_KEY):
                self._note(key.removeprefix(_KEY), value > 0, version)
        self._version = version
        return states

    def _note(self, name: str, is_on: bool, version: int) -> None:
        """Count a step with an alarm; one that was on and is not any more is over."""
        if not is_on:
            if name in self._on:
                self._on.remove(name)
                self._over.append(f"step {version}: the alarm {name}, on since step {self._steps[name].since}, is over")
            return
        self._on.add(name)
        steps = self._steps.setdefault(name, _Steps(0, version, version))
        if steps.last < self._version:
            steps.since = version
        steps.count, steps.last = steps.count + 1, version

    def take_new(self) -> list[CollapseFinding]:
        """Return the findings with alarms that began since the last call, in order."""
        found, self._new = self._new, []
        return found

    def take_over(self) -> list[str]:
        """Return a line for the console for each alarm that ended since the last call."""
        told, self._over = self._over, []
        return told

    def sentence(self) -> str:
        """Return the alarms of the run in words; empty: there was none."""
        if not self._steps:
            return ""
        told = []
        for name, steps in self._steps.items():
            if steps.last == self._version:
                told.append(f"{name} since step {steps.since}")
            else:
                told.append(f"{name} at {steps.count} step{'s' * (steps.count > 1)}, the last was {steps.last}")
        begin = ""
        for is_caution, words in ((False, "The run has stopped learning: "), (True, "")):
            found = self._newest
            names = [n for n in found.beyond if COLLAPSE_SIGNALS[n].is_caution == is_caution] if found else []
            begin += f"{words}{'; '.join(found.text(name) for name in names)}. " if found and names else ""
        return f"{begin}Alarms: {', '.join(told)} ({PAGE})"


def alarm_texts(finding: CollapseFinding) -> list[str]:
    """Return a line for the console for each alarm that began at a step."""
    return [
        f"ALARM at step {finding.version}: {finding.text(name)}. {COLLAPSE_SIGNALS[name].advice}."
        for name in finding.new
    ]
