from __future__ import annotations

import asyncio
import threading
import time
from functools import partial

import pytest

from async_rl.errors import RewardError
from rollout_server.reward_threads import MAX_THREADS, RewardThreads


def run(calls: list, timeout_s: float = 10.0) -> list[float]:
    return asyncio.run(RewardThreads(timeout_s).run(calls))


def test_rewards_come_back_in_order_as_floats() -> None:
    assert run([lambda: 1, lambda: 0.5, lambda: True]) == [1.0, 0.5, 1.0]


def test_a_raising_call_is_named_by_its_error() -> None:
    with pytest.raises(RewardError, match="ZeroDivisionError: division by zero"):
        run([lambda: 1.0, lambda: 1 / 0])


def test_a_raising_call_is_named_with_the_file_and_line_that_raised() -> None:
    line = _raise.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"KeyError: 'unit', at .*test_rewards_threads\.py:{line}$"):
        run([_raise])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "high"])
def test_a_result_that_is_no_finite_number_is_refused(value: object) -> None:
    with pytest.raises(RewardError, match=str(value)):
        run([lambda: value])


def test_a_call_that_hangs_fails_its_own_group_only() -> None:
    release = threading.Event()

    async def hang_beside_others() -> list[object]:
        threads = RewardThreads(timeout_s=0.2)
        hanging = [threads.run([lambda: 1.0, partial(release.wait, 30)]) for _ in range(MAX_THREADS + 3)]
        results = await asyncio.gather(*hanging, threads.run([lambda: 2.0]), return_exceptions=True)
        return [*results, await threads.run([lambda: 3.0])]

    *hung, beside, after = asyncio.run(hang_beside_others())
    release.set()
    assert all(isinstance(error, RewardError) and "timeouts.reward_s = 0.2" in str(error) for error in hung)
    assert (beside, after) == ([2.0], [3.0])


def test_the_timeout_is_for_one_call_not_for_the_group() -> None:
    assert run([partial(_slow, 0.15)] * 4, timeout_s=0.4) == [1.0] * 4


def _raise() -> float:
    return {}["unit"]  # type: ignore[no-any-return]


def _slow(seconds: float) -> float:
    time.sleep(seconds)
    return 1.0
