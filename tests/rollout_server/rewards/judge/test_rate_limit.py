"""The rate limit that workers of a host share."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from pathlib import Path

import pytest

from rollout_server.rewards.judge.rate_limit import RateLimit


async def acquired(*limits: RateLimit, times: int = 1) -> list[float]:
    """The seconds that requests wait, `times` of each worker, all at once."""

    async def wait(limit: RateLimit) -> float:
        return await limit.acquire() + await limit.wait_out_block()

    return await asyncio.gather(*(wait(limit) for limit in limits for _ in range(times)))


def test_two_workers_share_the_rate_and_may_burst_for_a_second(tmp_path: Path) -> None:
    with closing(RateLimit(tmp_path, 6000)) as one, closing(RateLimit(tmp_path, 6000)) as other:
        waited = sorted(asyncio.run(acquired(one, other, times=55)))
    assert waited[98] < waited[-1] and 0.03 < waited[-1] < 3  # 100 a second, and 110 come at once


def test_without_a_rate_nobody_waits_until_the_endpoint_asks_for_it(tmp_path: Path) -> None:
    with closing(RateLimit(tmp_path, 0)) as one, closing(RateLimit(tmp_path, 0)) as other:
        assert max(asyncio.run(acquired(one, other, times=50))) < 2
        one.block(0.1)
        assert min(asyncio.run(acquired(one, other))) > 0.08


def test_a_folder_that_is_not_there_limits_one_worker_alone(tmp_path: Path) -> None:
    with closing(RateLimit(tmp_path / "none", 0)) as one, closing(RateLimit(tmp_path / "none", 0)) as other:
        one.block(10)
        assert asyncio.run(acquired(other))[0] < 5


def test_times_from_before_a_restart_of_the_host_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RateLimit(tmp_path, 60)) as limit:
        now_s = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now_s + 1e7)
        limit.block(100)
        asyncio.run(acquired(limit, times=0))
        monkeypatch.undo()
        assert asyncio.run(acquired(limit))[0] < 5
