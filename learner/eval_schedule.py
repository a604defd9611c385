"""Decides which versions are evaluated beside training, and knows whether an evaluation is going on."""

from __future__ import annotations

import threading

from async_rl.config import Config
from async_rl.errors import WaitTimeoutError


class EvalSchedule:
    """Decides on one learner rank when an evaluation is due. The driver reports its end here from another thread."""

    def __init__(self, config: Config) -> None:
        self._eval = config.eval
        self._timeout_s = config.timeouts.work_s
        self._push_every = config.weight_sync.every_steps
        # Version 0 is due on evaluation servers; else the driver has it evaluated before training.
        self._served = -1 if config.placement.eval.servers else 0
        self._idle = threading.Event()
        self._idle.set()

    def resume(self, version: int) -> None:
        """Continue from `version`. An evaluation of this version that was due is due again: it may not have ended.

        So the version served before it counts, which is the last multiple of weight_sync.every_steps below it.
        """
        self._served = (version - 1) // self._push_every * self._push_every

    def served(self, version: int) -> bool:
        """Record that every server serves `version`, and return whether an evaluation of this version is due.

        It is due for the first version served at or after each multiple of eval.every_steps.
        """
        is_due, self._served = self.is_due(version), version
        return is_due

    def is_due(self, version: int) -> bool:
        """Return whether an evaluation of `version` is due once every server serves it, as the next one."""
        if self._eval.every_steps == 0 or self._eval.size == 0:
            return False
        return self._served // self._eval.every_steps < version // self._eval.every_steps

    @property
    def is_idle(self) -> bool:
        """Whether no evaluation runs that began with `begin`."""
        return self._idle.is_set()

    def begin(self) -> None:
        """Note, before the driver is told, that an evaluation runs until `ended` is called."""
        self._idle.clear()

    def ended(self) -> None:
        """Note that the evaluation has ended, or that its result is not wanted any more."""
        self._idle.set()

    def wait(self) -> None:
        """Wait until the running evaluation has ended.

        Raises:
            WaitTimeoutError: the evaluation did not end within timeouts.work_s.
        """
        if not self._idle.wait(self._timeout_s):
            raise WaitTimeoutError(
                f"the learner held its push back for {self._timeout_s:.0f} s (timeouts.work_s) for the held-out "
                f"evaluation before it, which has not ended. Make eval.size smaller or eval.every_steps larger, or "
                "unset what needs each evaluation: eval.pin_version, checkpoint.keep_best, watch.action"
            )
