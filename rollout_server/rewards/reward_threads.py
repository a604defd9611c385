"""Reward functions belong to the user: they may block, hang or raise, and must not stop the event loop."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence

from async_rl.errors import RewardError, WaitTimeoutError, raised_at

MAX_THREADS = 32
_Calls = Sequence[Callable[[], float]]


class _Group:
    """Calls that are waited for together, each in a thread of its own."""

    def __init__(self, calls: _Calls) -> None:
        self.calls = calls
        self._loop = asyncio.get_running_loop()
        self.outcome: asyncio.Future[list[float]] = self._loop.create_future()
        """Once it is done, as a call failed or nobody waits any more, no further call begins."""
        self._rewards: dict[int, float] = {}

    def resolve_placement(self, index: int, outcome: float | RewardError) -> None:
        """Of one call, from any thread."""
        if isinstance(outcome, RewardError):
            self._deliver_soon(outcome)
            return
        self._rewards[index] = outcome
        if len(self._rewards) == len(self.calls):  # two threads may both see this: the second is not heard
            self._deliver_soon([self._rewards[i] for i in range(len(self.calls))])

    def _deliver_soon(self, outcome: list[float] | RewardError) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outcome)

    def _deliver(self, outcome: list[float] | RewardError) -> None:
        if self.outcome.done():
            return
        if isinstance(outcome, RewardError):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)


class RewardThreads:
    """Daemon threads that take one call at a time, in the order of `run`. One whose call hangs is given up, and another
    takes its place.
    """

    def __init__(self, timeout_s: float, num_threads: int) -> None:
        """`timeout_s`: for each call, from when a thread begins on it."""
        self._timeout_s = timeout_s
        self._num_threads = num_threads
        self._queue: queue.SimpleQueue[tuple[_Group, int] | None] = queue.SimpleQueue()
        self._begun_s: dict[tuple[_Group, int], float] = {}
        """When each call that runs now began. Who takes a call out decides about it: its thread with a result, or
        `_replace_overdue`."""
        for _ in range(num_threads):
            self._start_thread()

    async def run(self, calls: _Calls) -> list[float]:
        """The results in order. A cancelled `run` begins on no further call.

        Raises:
            RewardError: a call raised, did not return a finite number, or took longer than the timeout.
            WaitTimeoutError: not within `limit_s`, with calls that waited for a thread.
        """
        limit_s, num_before = self.limit_s(len(calls)), self._queue.qsize()
        end_s = time.monotonic() + limit_s
        group = _Group(calls)
        for index in range(len(calls)):
            self._queue.put((group, index))
        try:
            # Whoever waits looks after all threads: a call that hangs may be of a group that was cancelled.
            while not group.outcome.done():
                if time.monotonic() >= end_s:
                    raise WaitTimeoutError(
                        f"{len(calls)} answers waited {limit_s:g} s for the {self._num_threads} reward threads, behind "
                        f"{num_before} others that may take timeouts.reward_s = {self._timeout_s:g} s each"
                    )
                await asyncio.wait([group.outcome], timeout=self._until_overdue_s())
                self._replace_overdue()
            return group.outcome.result()
        finally:
            group.outcome.cancel()

    def limit_s(self, num_calls: int) -> float:
        """For so many more calls, if all that are queued before them take their whole time; twice that, as the host
        may be busy."""
        rounds = 1 + math.ceil((self._queue.qsize() + num_calls) / self._num_threads)
        return 2 * rounds * self._timeout_s

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="rewards", daemon=True).start()

    def _until_overdue_s(self) -> float:
        """What has not begun yet is overdue after all that has."""
        now_s = time.monotonic()
        return max(0.0, min(self._begun_s.copy().values(), default=now_s) + self._timeout_s - now_s)

    def _replace_overdue(self) -> None:
        now_s = time.monotonic()
        for call, begun_s in self._begun_s.copy().items():  # a copy is made in one step, threads or no
            if now_s - begun_s < self._timeout_s or self._begun_s.pop(call, None) is None:
                continue
            self._start_thread()
            error = f"the reward function took longer than timeouts.reward_s = {self._timeout_s:g} s for one response"
            group, index = call
            if group.outcome.cancelled():
                warnings.warn(f"{error}; its group was given up meanwhile", stacklevel=2)
            group.resolve_placement(index, RewardError(error))

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            group, index = call
            if group.outcome.done():
                continue
            self._begun_s[call] = time.monotonic()
            outcome = _outcome(group.calls[index])
            if self._begun_s.pop(call, None) is None:
                return  # it was overdue: another thread has taken this one's place
            group.resolve_placement(index, outcome)


def _outcome(call: Callable[[], float]) -> float | RewardError:
    try:
        return _checked(call())
    except RewardError as error:
        return error
    except (Exception, SystemExit) as error:
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
