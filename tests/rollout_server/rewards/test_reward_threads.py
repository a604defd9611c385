from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from async_rl.base.errors import RewardError
from rollout_server.rewards.contract import RewardThreads

NUM_THREADS = 4


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """An event for calls that hang; it is set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


def test_a_call_that_hangs_fails_its_own_group_only(release: threading.Event) -> None:
    async def hang_beside_others() -> list[object]:
        with closing(RewardThreads(0.2, NUM_THREADS)) as threads:
            hanging = [threads.run([lambda: 1.0, release.wait]) for _ in range(NUM_THREADS + 3)]
            results = await asyncio.gather(*hanging, threads.run([lambda: 2.0]), return_exceptions=True)
            return [*results, await threads.run([lambda: 3.0])]

    *hung, beside, after = asyncio.run(hang_beside_others())
    assert all(isinstance(error, RewardError) and "timeouts.reward_s = 0.2" in str(error) for error in hung)
    assert (beside, after) == ([2.0], [3.0])


@pytest.mark.parametrize("num_cancelled", [1, 3 * NUM_THREADS])
@pytest.mark.filterwarnings("ignore:the reward function took longer")
def test_threads_that_hang_for_cancelled_groups_are_replaced(release: threading.Event, num_cancelled: int) -> None:
    before, begun = set(threading.enumerate()), list[int]()

    async def cancel_hanging() -> list[float]:
        with closing(RewardThreads(0.2, NUM_THREADS)) as threads:
            await cancelled([threads.run([partial(_hang, release, begun)]) for _ in range(num_cancelled)], begun)
            rewards = await asyncio.wait_for(threads.run([lambda: 2.0] * 8), 5)
            release.set()
            return rewards

    assert asyncio.run(cancel_hanging()) == [2.0] * 8
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()  # those replaced have ended as well


def test_a_cancelled_group_begins_on_no_further_answer(release: threading.Event) -> None:
    begun: list[int] = []

    async def cancel_queued() -> list[float]:
        with closing(RewardThreads(10, 1)) as threads:
            groups = [[partial(_hang, release, begun, 3 * group + i) for i in range(3)] for group in range(2)]
            await cancelled([threads.run(calls) for calls in groups], begun)
            release.set()
            return await threads.run([lambda: 2.0])

    assert asyncio.run(cancel_queued()) == [2.0]
    assert begun == [0]


async def cancelled(runs: list, begun: list) -> None:
    """Start the runs, and cancel them once a call has begun."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    while not begun:
        await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _hang(release: threading.Event, begun: list[int], number: int = 0) -> float:
    begun.append(number)
    return float(release.wait())
