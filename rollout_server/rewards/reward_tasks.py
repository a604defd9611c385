"""Awaits reward functions that are `async def`, in the event loop, within time limits.

A run whose rewards are plain functions does not load this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from async_rl.base.errors import RewardError, WaitTimeoutError, first_error
from rollout_server.episodes.user_code import ForeignCode, OverdueError
from rollout_server.rewards.contract import raised, time_limit_s


class RewardTasks:
    """Awaits reward functions, at most `num_tasks` at a time, each for at most `timeout_s`.

    Args:
        limit: the configuration key of `timeout_s`, for error messages.
    """

    def __init__(self, timeout_s: float, num_tasks: int, limit: str = "timeouts.reward_s") -> None:
        self._timeout_s = timeout_s
        self._limit = f"{limit} = {timeout_s:g} s"
        self._num_tasks = num_tasks
        self._places = asyncio.Semaphore(num_tasks)
        self._num_calls = 0
        """The calls that run or wait for a place."""

    async def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Await all functions and return their results in the same order. The first failure cancels the others.

        Raises:
            RewardError: a function raised, or took longer than the timeout.
            WaitTimeoutError: results are missing after `limit_s`, because calls still wait to start.
        """
        limit_s, num_before = self.limit_s(len(functions)), self._num_calls
        self._num_calls += len(functions)
        try:
            async with asyncio.timeout(limit_s) as limit, asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._call(function)) for function in functions]
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None
        except TimeoutError:
            if not limit.expired():
                raise
            raise WaitTimeoutError(
                f"{len(functions)} answers waited {limit_s:g} s for the {self._num_tasks} places of the reward, "
                f"behind {num_before} others that may take {self._limit} each"
            ) from None
        finally:
            self._num_calls -= len(functions)
        return [task.result() for task in tasks]

    def limit_s(self, num_calls: int) -> float:
        """Return the time limit of a `run` with `num_calls` calls, after the calls already waiting; see `time_limit_s`.
        """
        return time_limit_s(self._num_calls + num_calls, self._num_tasks, self._timeout_s)

    def close(self) -> None:
        """Do nothing: each `run` ends its own tasks."""

    async def _call(self, function: Callable[[], Any]) -> Any:
        async with self._places:
            foreign = ForeignCode()
            try:
                return await foreign.call(function, self._timeout_s, "the reward")
            except OverdueError:
                raise RewardError(f"the reward function took longer than {self._limit} for one call") from None
            except RewardError:
                raise
            except Exception as error:
                raise raised(error) from error
            finally:
                await foreign.end_cancelled_calls()
                await foreign.end_created_tasks()
