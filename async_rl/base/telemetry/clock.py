"""The clock of a run: seconds of the driver's monotonic clock, which nobody can set.

All processes of a host have one monotonic clock, so that the times in their reports are comparable as they are. Each
other host has its own, which the driver maps to its own by the difference between the sending and the arrival of
reports. The wall clock is used for nothing, so a run does not notice that it is set.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from functools import cache
from pathlib import Path

REPORTS_COMPARED = 600
"""The quickest of so many last reports of a host tells the difference of the clocks: a few minutes' reports."""


@cache
def clock_id() -> str:
    """Return a name for the monotonic clock of this process; two processes with the same name have the same clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return platform.node()


class HostClocks:
    """Maps the times of other hosts' monotonic clocks to this process's clock.

    A report takes some time on its way, hence arrival - sending is above the difference of the clocks, least so for
    the quickest report.
    """

    def __init__(self) -> None:
        self._differences_s: dict[str, deque[float]] = {}

    def behind_s(self, clock: str, sent_s: float) -> float:
        """Return the seconds to add to times of `clock` to get times of this process's clock.

        Args:
            clock: the `clock_id` of the process that sent a report, which arrives now.
            sent_s: its time.monotonic() when it made the report.
        """
        if clock == clock_id():
            return 0.0
        found = self._differences_s.setdefault(clock, deque(maxlen=REPORTS_COMPARED))
        found.append(time.monotonic() - sent_s)
        return min(found)
