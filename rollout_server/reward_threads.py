"""Reward functions belong to the user: they may block, hang or raise, and must not stop the event loop."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence

from async_rl.errors import RewardError, raised_at

MAX_THREADS = 32
_Calls = Sequence[Callable[[], float]]


class _Job:
    def __init__(self, calls: _Calls) -> None:
        self.calls = calls
        self.loop = asyncio.get_running_loop()
        self.result: asyncio.Future[list[float]] = self.loop.create_future()
        self.call_started_s: float | None = None
        """When the call that is running now began; None while the job waits for a thread."""


class RewardThreads:
    """Up to 32 daemon threads, one group of calls at a time each. A call that hangs is left to its thread."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: for each call."""
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._num_jobs = 0

    async def run(self, calls: _Calls) -> list[float]:
        """Runs the calls one after the other in one thread.

        Raises:
            RewardError: a call raised, did not return a finite number, or took longer than the timeout.
        """
        self._num_jobs += 1
        if self._num_jobs > self._num_threads and self._num_threads < MAX_THREADS:
            self._num_threads += 1
            self._start_thread()
        job = _Job(calls)
        self._jobs.put(job)
        try:
            return await self._wait(job)
        finally:
            self._num_jobs -= 1

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="rewards", daemon=True).start()

    async def _wait(self, job: _Job) -> list[float]:
        while True:
            started_s = job.call_started_s
            # A job without a thread waits for other jobs, whose calls are timed.
            elapsed_s = 0.0 if started_s is None else time.monotonic() - started_s
            if elapsed_s >= self._timeout_s:
                job.result.cancel()
                self._start_thread()  # in place of the one that hangs
                raise RewardError(
                    f"the reward function took longer than timeouts.reward_s = {self._timeout_s:g} s "
                    "for one response"
                )
            await asyncio.wait([job.result], timeout=self._timeout_s - elapsed_s)
            if job.result.done():
                return job.result.result()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                rewards = []
                for call in job.calls:
                    job.call_started_s = time.monotonic()
                    rewards.append(_checked(call()))
            except Exception as error:
                self._deliver(job, _as_reward_error(error))
            else:
                self._deliver(job, rewards)
            if job.result.cancelled():
                return  # timed out meanwhile: another thread has taken this one's place

    def _deliver(self, job: _Job, outcome: list[float] | Exception) -> None:
        def deliver() -> None:
            if job.result.done():
                return
            if isinstance(outcome, Exception):
                job.result.set_exception(outcome)
            else:
                job.result.set_result(outcome)

        if not job.loop.is_closed():
            job.loop.call_soon_threadsafe(deliver)


def _as_reward_error(error: Exception) -> RewardError:
    if isinstance(error, RewardError):
        return error
    wrapped = RewardError(f"{type(error).__name__}: {error}, at {raised_at(error)}")
    wrapped.__cause__ = error
    return wrapped


def _checked(reward: float) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError):
        raise RewardError(f"the reward function must return a number, got {reward!r}") from None
    if not math.isfinite(value):
        raise RewardError(f"the reward function must return a finite number, got {value}")
    return value
