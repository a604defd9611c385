"""The benchmark of a slow judge: its rate by hand, and its endpoint, which fails as often as it is told to."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from async_rl.config.loading import load_config
from benchmarks.judge import ROOT, Scored, endpoint, per_s, row, score_for, settings


def steps(times_s: list[float]) -> list[dict[str, float]]:
    """Steps of 100 answers that end at these times."""
    starts = [0.0, *times_s]
    return [
        {"time/since_first_step_s": end_s, "time/step_s": end_s - start_s, "batch/episodes": 100.0}
        for start_s, end_s in zip(starts, times_s, strict=False)
    ]  # fmt: skip


def test_the_rate_is_that_of_the_settled_run_without_the_time_of_an_outage() -> None:
    even = [float(n) for n in range(28)]
    assert per_s(steps(even)) == (pytest.approx(100), 0)  # 7 steps settle, 4 parts of 5 follow
    away = [time_s + 60 * (n > 15) for n, time_s in enumerate(even)]
    assert per_s(steps(away)) == (pytest.approx(100), 1)
    uneven = [time_s + 2 * (n > 15) for n, time_s in enumerate(even)]
    assert per_s(steps(uneven)) == (pytest.approx(2000 / 22), 0)
    name, rate, ratio, *_, longest, parts = row("away", steps(away), 200.0)
    assert (name, rate, ratio, longest, parts) == ("away", "100", "0.50", "61.0", "1 of 4")


def test_the_endpoint_scores_the_share_of_right_letters_and_fails_as_often_as_told() -> None:
    async def ask(errors: float, count: int) -> Counter[str]:
        found: Counter[str] = Counter()
        async with TestClient(TestServer(endpoint(0.0, errors))) as client:
            for _ in range(count):
                body = {"messages": [{"role": "user", "content": "abcd\nabxx"}]}
                try:
                    async with client.post("/v1/chat/completions", json=body) as response:
                        if response.status == 200:
                            reply = (await response.json())["choices"][0]["message"]["content"]
                            found[f"score {json.loads(reply)['score']:g}"] += 1
                        else:
                            found[f"HTTP {response.status}"] += 1
                except aiohttp.ClientError:
                    found["broken"] += 1
        return found

    assert asyncio.run(ask(0.0, 3)) == {"score 5": 3}
    found = asyncio.run(ask(0.5, 60))
    assert set(found) == {"score 5", "HTTP 500", "HTTP 429", "broken"} and 15 < found["score 5"] < 45


def test_scoring_alone_counts_failures_and_no_wrong_verdict() -> None:
    async def score() -> Scored:
        async with TestServer(endpoint(0.0, 0.3)) as server:
            assert server.port
            return await score_for(server.port, at_once=16, seconds=1.0, settling_s=0.2)

    found = asyncio.run(score())
    assert found.per_s > 0 and found.counts["scoring/judge/calls"] >= 16
    assert found.counts["scoring/judge/retries"] > 0 and 0 < found.longest_s < 60
    assert (found.counts["scoring/judge/no_verdict"], found.wrong) == (0, 0)


def test_a_run_has_room_for_a_request_for_each_answer_that_it_may_begin() -> None:
    config = load_config(ROOT / "configs" / "quickstart.yaml", settings(1234))
    assert config.slots == config.rollout.concurrency == 800
    assert config.judge.concurrency == config.slots * config.rollout.group_size == 6400
