"""A reward opens a connection or a process once, and again for the next group where that failed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

import pytest

from async_rl.base.config import Config
from async_rl.base.errors import RewardError
from async_rl.base.telemetry.metrics import reduce_metrics
from rollout_server.rewards.contract import Reward
from rollout_server.rewards.scoring import Scoring, Verdict
from tests.kit.configs import make_config
from tests.kit.rewards import QUESTION, named, told


def test_opening_that_fails_or_hangs_fails_its_group_and_is_tried_again() -> None:
    outcomes = iter([ConnectionRefusedError("no such service"), TimeoutError("no reply"), None, 1.0])
    waits: list[tuple[str, str, float]] = []

    @asynccontextmanager
    async def opened(config: Config, settings: Any) -> AsyncIterator[Callable[..., Any]]:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is None:
            await asyncio.sleep(60)
        yield lambda question, response: outcome

    def wait(*named: Any) -> AbstractContextManager[None]:
        waits.append(named)
        return nullcontext()

    async def score() -> tuple[list[Verdict], dict[str, float]]:
        config = make_config(timeouts={"startup_s": 0.1})
        scoring = Scoring(config, [named(Reward(open=opened), name="service")], wait)
        for named_by in ("ConnectionRefusedError", "TimeoutError", r"timeouts\.startup_s"):
            with pytest.raises(RewardError, match=f"^service: .*{named_by}"):
                await scoring.score(QUESTION, [told("4")])
        verdicts = await scoring.score(QUESTION, [told("4")])
        await scoring.aclose()
        return verdicts, reduce_metrics(scoring.drain_metrics())

    verdicts, counts = asyncio.run(score())
    assert [each.reward for each in verdicts] == [1.0] and counts["scoring/service/failed"] == 3
    assert [each[2] == 0.1 for each in waits] == [True] * 4 + [False]  # the last one scores
