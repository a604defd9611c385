"""Decides which versions are evaluated beside training; with eval.pin_version the next push waits for the result."""

from __future__ import annotations

import threading

from async_rl.config import Config
from async_rl.errors import WaitTimeoutError


class EvalSchedule:
    """Decides on one learner rank when an evaluation is due. The driver reports its end here from another thread."""

    def __init__(self, config: Config) -> None:
        self._eval = config.eval
        self._timeout_s = config.timeouts.work_s
        self._served = 0
        self._idle = threading.Event()
        self._idle.set()

    def resume(self, version: int) -> None:
        """Continue from `version`. An evaluation of this version that was due is due again: it may not have ended."""
        self._served = version - 1

    def served(self, version: int) -> bool:
        """Record that every server serves `version`, and return whether an evaluation of this version is due.

        It is due for the first version served at or after each multiple of eval.every_steps.
        """
        before, self._served = self._served, version
        if self._eval.every_steps == 0 or self._eval.size == 0:
            return False
        is_due = before // self._eval.every_steps < version // self._eval.every_steps
        if is_due and self._eval.pin_version:
            self._idle.clear()
        return is_due

    def ended(self) -> None:
        """Let pushes go on: the evaluation has ended, or its result is not wanted any more."""
        self._idle.set()

    def wait(self) -> None:
        """Wait until the running evaluation has ended, if eval.pin_version holds the next push back for it.

        Raises:
            WaitTimeoutError: the evaluation did not end within timeouts.work_s.
        """
        if not self._idle.wait(self._timeout_s):
            raise WaitTimeoutError(
                f"the learner held its push back for {self._timeout_s:.0f} s (timeouts.work_s) for the held-out "
                f"evaluation of version {self._served}, which has not ended. Make eval.size smaller, or set "
                "eval.pin_version: false"
            )
