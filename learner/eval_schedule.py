"""Which versions are evaluated beside training, and the push that waits for it (eval.pin_version)."""

from __future__ import annotations

import threading

from async_rl.config import Config
from async_rl.errors import WaitTimeoutError


class EvalSchedule:
    """Told by the learner of every version that all servers serve, and by the driver, from another thread, of ends."""

    def __init__(self, config: Config) -> None:
        self._eval = config.eval
        self._timeout_s = config.timeouts.eval_s
        self._served = 0
        self._idle = threading.Event()
        self._idle.set()

    def resume(self, version: int) -> None:
        """The evaluation of `version`, if one was due, may have been cut short."""
        self._served = version - 1

    def served(self, version: int) -> bool:
        """Whether an evaluation of `version` is due: the first since another multiple of eval.every_steps."""
        before, self._served = self._served, version
        if self._eval.every_steps == 0 or self._eval.size == 0:
            return False
        is_due = before // self._eval.every_steps < version // self._eval.every_steps
        if is_due and self._eval.pin_version:
            self._idle.clear()
        return is_due

    def ended(self) -> None:
        """No evaluation runs, or nobody wants it any more."""
        self._idle.set()

    def wait(self) -> None:
        """Until the evaluation that pins the version, if any, has ended.

        Raises:
            WaitTimeoutError: not within timeouts.eval_s.
        """
        if not self._idle.wait(self._timeout_s):
            raise WaitTimeoutError(
                f"the learner held its push back for {self._timeout_s:.0f} s (timeouts.eval_s) for the held-out "
                f"evaluation of version {self._served}, which has not ended. Make eval.size smaller, or set "
                "eval.pin_version: false"
            )
