"""Attributes the learner's waits for a batch to what the group that was waited for did meanwhile.

A wait ends when a group arrives that completes a batch, or that had to be in it. That group was waited for: with its
message come the phases of its slowest episode, which are laid over the wait. A phase counts with its part of the wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from async_rl.messages.message_reader import refusal

PHASES = ("queued", "generate", "tools", "rewards")
"""The phases of a group. queued: no slot, no place in rollout.concurrency, or no prompt yet. generate: its slowest
episode waits for the engine. tools: this episode is with its tools, environment or agent. rewards: it has ended."""
FAILED = "failed"
"""The name for waits that ended because a group failed: it was waited for in vain."""
MAX_PHASES = 2**16


class Phase(NamedTuple):
    name: str
    """One of PHASES."""
    seconds: float


def read_phases(items: Sequence[object]) -> list[Phase]:
    """Return the phases in a message, `[[name, seconds], ...]`.

    Raises:
        WireError: a phase is not such a pair, has another name than those in PHASES, or lasts a negative time.
    """
    found = []
    for number, item in enumerate(items):
        if not isinstance(item, list) or len(item) != 2:
            raise refusal(f"phases[{number}]", item, "a list of name and seconds")
        name, seconds = item
        if name not in PHASES:
            raise refusal(f"phases[{number}]", name, f"one of {', '.join(PHASES)}")
        if type(seconds) is not float or not 0 <= seconds < float("inf"):
            raise refusal(f"phases[{number}]", seconds, "a finite number of seconds >= 0")
        found.append(Phase(name, seconds))
    return found


class LearnerWaits:
    """Measures the waits for the next batch, and attributes them once the batch is handed out.

    All times are by the buffer's clock.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        """The time since when the learner waits; None: it does not."""
        self._late_since_s: float | None = None
        """The time since when only late groups are missing from the next batch."""
        self._waits: list[tuple[float, float]] = []
        """(begin, end) of each wait for the next batch: a learner asks again and again, and may do other things
        between."""
        self._phases: list[Phase] = []
        self._ended_s: float | None = None
        """The time at which the last group arrived, with `_phases`; None: the last group to end has failed."""
        self._handed_out = (-1, dict[str, float]())

    def begin(self, now_s: float) -> None:
        """Note that the learner waits. Does nothing if it waits already."""
        if self._began_s is None:
            self._began_s = now_s

    def interrupt(self, now_s: float) -> None:
        """Note that the learner was answered without a batch, so that it may do something else before it asks again."""
        if self._began_s is not None:
            self._waits.append((self._began_s, now_s))
            self._began_s = None

    def miss_late(self, now_s: float) -> None:
        """Note that from now on only groups are waited for that expire: without them there are enough for a batch."""
        if self._late_since_s is None:
            self._late_since_s = now_s

    def arrive(self, phases: list[Phase], now_s: float) -> None:
        """Note that a group arrived, and the phases after which it did."""
        self._phases, self._ended_s = phases, now_s

    def fail(self) -> None:
        """Note that a group failed."""
        self._ended_s = None

    def hand_out(self, version: int, now_s: float) -> dict[str, float]:
        """Return the seconds that the learner waited for batch `version`, as metrics.

        They are `buffer/waited_for/<name>`, which add up to the wait, and `buffer/waited_for_late_s`, the part of it in
        which only groups were missing that expire. The same batch again gives the same metrics.
        """
        if version == self._handed_out[0]:
            self._began_s = None
            return self._handed_out[1]
        self.interrupt(now_s)
        seconds = dict.fromkeys((*PHASES, FAILED), 0.0)
        for begin_s, end_s in self._waits:
            for name, part_s in self._attributed(begin_s, end_s):
                seconds[name] += part_s
        since_s = now_s if self._late_since_s is None else self._late_since_s
        late_s = sum(max(0.0, end_s - max(begin_s, since_s)) for begin_s, end_s in self._waits)
        self._waits.clear()
        self._late_since_s = None
        metrics = {f"buffer/waited_for/{name}": value for name, value in seconds.items()}
        metrics["buffer/waited_for_late_s"] = late_s
        self._handed_out = (version, metrics)
        return metrics

    def _attributed(self, begin_s: float, end_s: float) -> list[tuple[str, float]]:
        """Split one wait by the phases of the group that was waited for, the last of which ended as it arrived."""
        if self._ended_s is None:
            return [(FAILED, end_s - begin_s)]
        parts = []
        until_s = end_s
        phase_end_s = self._ended_s
        for name, seconds in reversed(self._phases):
            phase_end_s -= seconds
            start_s = min(until_s, max(begin_s, phase_end_s))
            parts.append((name, until_s - start_s))
            until_s = start_s
        return [*parts, ("queued", until_s - begin_s)]
