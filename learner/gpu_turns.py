"""Keeps the steps of the learner and the starts of servers apart, where both take turns in using the same GPUs."""

from __future__ import annotations

import threading

from async_rl.config import Limit, TimeoutsConfig
from async_rl.errors import WaitTimeoutError


class GpuTurns:
    """Lets either the learner take a step or lost servers start again. A server measures the free memory of its GPU.

    One that starts in the middle of a step would have a small KV cache for the rest of the run, or none. The driver
    calls `begin_start` and `end_start` of rank 0 from other threads; on other ranks no step waits.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._steps = False
        """Whether the learner is in a step, which ends when its weights are pushed."""
        self._starting: set[str] = set()

    def begin_step(self, limit: Limit) -> None:
        """Wait until no server is starting, and begin a step. WaitTimeoutError: one still does so after `limit`."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._starting, limit.seconds):
                names = ", ".join(sorted(self._starting))
                raise WaitTimeoutError(f"the learner waited {limit} for the start of {names}, on a GPU that they share")
            self._steps = True

    def end_step(self) -> None:
        with self._changed:
            self._steps = False
            self._changed.notify_all()

    def begin_start(self, name: str, limit: Limit) -> None:
        """Wait until the learner is in no step, and keep it from the next one until `end_start`.

        Raises:
            WaitTimeoutError: the step has not ended within `limit`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._steps, limit.seconds):
                raise WaitTimeoutError(f"{name} waited {limit} to start on the learner's GPU, for the end of its step")
            self._starting.add(name)

    def end_start(self, name: str) -> None:
        """Note that the start of server `name` has ended, well or not."""
        with self._changed:
            self._starting.discard(name)
            self._changed.notify_all()


def start_limit(timeouts: TimeoutsConfig) -> Limit:
    """Return how long a step waits for servers: each may take timeouts.startup_s to start, and to reach the others."""
    return Limit(timeouts.work_s + 2 * timeouts.startup_s, "timeouts.work_s + 2 * timeouts.startup_s")
