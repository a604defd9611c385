"""Calls reward functions that may block, hang or raise, in threads, within time limits."""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from async_rl.base.errors import RewardError, WaitTimeoutError, raised_at
from async_rl.base.host import usable_cores

MAX_THREADS = 32
MAX_TASKS = 256
IDLE_TIMEOUT_S = 300.0
"""The longest wait for an idle child process of a reward. A user's reward function may call from more threads than
there are children; timeouts.reward_s usually ends its wait earlier."""


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.future: Future[Any] = Future()
        self.result = asyncio.wrap_future(self.future)
        """Cancelling this future cancels the call, unless a thread has begun it."""


class RewardThreads:
    """A pool of daemon threads that call reward functions. Calls start in the order of their arrival.

    A thread whose call takes longer than `timeout_s` is given up, and a new thread replaces it.

    Args:
        timeout_s: the time limit of one call.
        limit: the configuration key of `timeout_s`, for error messages.
    """

    def __init__(self, timeout_s: float, num_threads: int, limit: str = "timeouts.reward_s") -> None:
        self._timeout_s = timeout_s
        self._limit = f"{limit} = {timeout_s:g} s"
        self._num_threads = num_threads
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._begun_s: dict[_Call, float] = {}
        """When each running call began. Whichever removes it, its thread or `_replace_overdue`, sets its outcome."""
        for _ in range(num_threads):
            self._start_thread()

    async def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call all functions in the threads, wait for them, and return their results in the same order.

        Once a call has failed or `run` is cancelled, no further call starts.

        Raises:
            RewardError: a call raised, or took longer than the timeout.
            WaitTimeoutError: results are missing after `limit_s`, because calls still wait for a thread.
        """
        if not functions:  # no episode of the group can be scored
            return []
        limit_s, num_before = self.limit_s(len(functions)), self._queue.qsize()
        end_s = time.monotonic() + limit_s
        calls = [_Call(function) for function in functions]
        for call in calls:
            self._queue.put(call)
        results = [call.result for call in calls]
        try:
            while True:
                if time.monotonic() >= end_s:
                    raise WaitTimeoutError(
                        f"{len(calls)} answers waited {limit_s:g} s for the {self._num_threads} reward threads, behind "
                        f"{num_before} others that may take {self._limit} each"
                    )
                done, waiting = await asyncio.wait(
                    results, timeout=self._until_overdue_s(), return_when=asyncio.FIRST_EXCEPTION
                )
                if errors := [error for result in done if (error := result.exception())]:
                    raise errors[0]
                if not waiting:
                    return [result.result() for result in results]
                self._replace_overdue()  # the calls of all groups, because a cancelled group no longer checks its own
        finally:
            for result in results:
                result.cancel()

    def limit_s(self, num_calls: int) -> float:
        """Return the time limit of a `run` with `num_calls` calls, after the calls already queued; see `time_limit_s`.
        """
        return time_limit_s(self._queue.qsize() + num_calls, self._num_threads, self._timeout_s)

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._queue.put(None)

    def _start_thread(self) -> None:
        threading.Thread(target=self._work, name="rewards", daemon=True).start()

    def _until_overdue_s(self) -> float:
        """Return the seconds until the longest running call reaches `timeout_s`; 0 if it has reached it."""
        now_s = time.monotonic()
        return max(0.0, min(self._begun_s.copy().values(), default=now_s) + self._timeout_s - now_s)

    def _replace_overdue(self) -> None:
        now_s = time.monotonic()
        for call, begun_s in self._begun_s.copy().items():  # dict.copy is atomic, so other threads may change it
            if now_s - begun_s < self._timeout_s or self._begun_s.pop(call, None) is None:
                continue
            self._start_thread()
            error = f"the reward function took longer than {self._limit} for one response"
            if call.result.cancelled():
                warnings.warn(f"{error}; the group had been given up meanwhile", stacklevel=2)
            call.future.set_exception(RewardError(error))

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            if not call.future.set_running_or_notify_cancel():
                continue
            self._begun_s[call] = time.monotonic()
            outcome = _outcome(call.function)
            if self._begun_s.pop(call, None) is None:
                return  # the call was overdue, and another thread has taken the place of this one
            if isinstance(outcome, RewardError):
                call.future.set_exception(outcome)
            else:
                call.future.set_result(outcome)


def num_children() -> int:
    """Return the number of a worker's processes for scoring: one per usable core, at least 2 and at most MAX_THREADS.

    A process with math-verify takes 60 MB.
    """
    return min(MAX_THREADS, max(2, usable_cores()))


def time_limit_s(num_calls: int, at_once: int, timeout_s: float) -> float:
    """Return twice the time that `num_calls` calls need if each takes the whole timeout and `at_once` run at a time.

    It includes one more round for calls that are already running. The factor of two allows for a busy host.
    """
    return 2 * (1 + math.ceil(num_calls / at_once)) * timeout_s


def _outcome(function: Callable[[], Any]) -> Any:
    """Call a function and return its result, or a RewardError if it raised."""
    try:
        return function()
    except RewardError as error:
        return error
    except (Exception, SystemExit) as error:
        return raised(error)


def raised(error: BaseException) -> RewardError:
    """Wrap what a reward function raised in a RewardError."""
    wrapped = RewardError(f"{type(error).__name__}: {error}, at {raised_at(error)}")
    wrapped.__cause__ = error
    return wrapped
