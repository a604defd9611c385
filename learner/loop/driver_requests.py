"""What the driver asks of a learner rank from other threads: to stop, save or pause, and to share GPUs with servers."""

from __future__ import annotations

import threading

from async_rl.base.config import Limit, TimeoutsConfig
from async_rl.base.errors import WaitTimeoutError
from learner.loop.batches import NoBatch

PAUSE_BEAT_S = 5.0
"""The other ranks wait for rank 0 at most so long at a time, however long a pause lasts."""


class DriverRequests:
    """Keeps what the driver asks for from another thread, until rank 0 heeds it when the step under way has ended."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._save = threading.Event()
        self._end_reason = ""
        self._is_paused = False
        self._changed = threading.Event()
        """Set by each request that ends the wait of a paused learner."""

    def stop(self) -> None:
        """Ask for the end of the run with a checkpoint, as after Ctrl-C."""
        self._stop.set()
        self._changed.set()

    def end(self, reason: str) -> None:
        """Ask for the end of the run as if run.steps were reached, for a `reason` that is not empty; the first counts.
        """
        self._end_reason = self._end_reason or reason

    def save(self) -> None:
        """Ask for a checkpoint."""
        self._save.set()

    def pause(self) -> None:
        """Ask for no further step until `go_on`."""
        self._is_paused = True
        self._changed.clear()

    def go_on(self) -> None:
        """Ask for the end of the pause."""
        self._is_paused = False
        self._changed.set()

    def wait_paused(self) -> None:
        """Wait until something else is asked for, PAUSE_BEAT_S at most: then the other ranks are told again."""
        self._changed.wait(PAUSE_BEAT_S)

    def saved(self) -> None:
        """Note that the checkpoint is being written."""
        self._save.clear()

    def why_no_batch(self) -> NoBatch | None:
        """Return what the learner has to do instead of a step, the most urgent first; None: nothing was asked for."""
        if self._stop.is_set():
            return NoBatch("stopped")
        if self._end_reason:
            return NoBatch("ended", self._end_reason)
        if self._save.is_set():
            return NoBatch("checkpoint wanted")
        return NoBatch("paused") if self._is_paused else None


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
    return Limit(timeouts.batch_s + 2 * timeouts.startup_s, "timeouts.batch_s + 2 * timeouts.startup_s")
