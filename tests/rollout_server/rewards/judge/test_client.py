"""The fate of requests when the judge limits, fails, hangs or lies: waiting, or no verdict, never a 0."""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import re
import selectors
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from async_rl.config import RolloutPlacement
from async_rl.errors import ConfigError, RewardError
from rollout_server.rewards.base import open_rewards
from rollout_server.rewards.judge import client, rate_limit
from rollout_server.rewards.scoring import Scoring
from tests.kit.configs import changed
from tests.kit.judges import Answer, FakeJudge, in_turn, judged_by, score, verdicts, verdicts_and_counts
from tests.kit.rewards import QUESTION, told


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(client, "LONGEST_PAUSE_S", 0.05)


def failing(status: int, text: str = "oops", retry_after: str = "") -> web.Response:
    return web.Response(status=status, text=text, headers={"Retry-After": retry_after} if retry_after else {})


def asked(answer: Answer, *answers: str, **judge: Any) -> tuple[list[float | None], dict[str, float], FakeJudge]:
    """The rewards of answers by this judge, the counts, and the judge."""

    async def ask() -> tuple[list[float | None], dict[str, float], FakeJudge]:
        fake = FakeJudge(answer)
        async with fake.serve() as url:
            found, counts = await verdicts_and_counts(judged_by(url, **judge), *(answers or ("x",)))
        return [verdict.reward for verdict in found], counts, fake

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("status", "text", "headers"),
    [(429, "slow", {"Retry-After": "0.02"}), (500, "oops", {}), (503, "", {}), (200, "<html>gateway</html>", {}),
     (200, "[]", {})],
)  # fmt: skip
def test_a_failure_that_passes_costs_waiting(status: int, text: str, headers: dict[str, str]) -> None:
    left = [1, 2]
    rewards, counts, fake = asked(
        lambda body: web.Response(status=status, text=text, headers=headers) if left and left.pop() else score(7)
    )
    assert rewards == [0.7] and len(fake.asked) == 3
    assert counts["scoring/judge/retries"] == 2 and counts["scoring/judge/requests"] == 3


def test_a_broken_connection_and_a_slow_reply_cost_waiting() -> None:
    async def ask() -> list[float | None]:
        slow = FakeJudge(in_turn(score(7)), latency_s=0.3)
        async with slow.serve() as url:
            asking = asyncio.create_task(verdicts(judged_by(url, timeout_s=0.15), "x"))
            await asyncio.sleep(0.2)
            slow.latency_s = 0
            return [verdict.reward for verdict in await asking]

    assert asyncio.run(ask()) == [0.7]


def test_an_outage_of_the_endpoint_costs_waiting_and_its_verdicts_stay() -> None:
    async def ask() -> tuple[list[float | None], float]:
        fake = FakeJudge(in_turn(score(7)))
        async with fake.serve() as url:
            pass
        began_s = time.monotonic()
        asking = asyncio.create_task(verdicts(judged_by(url), "x", "y"))
        await asyncio.sleep(0.3)
        async with fake.serve(int(url.split(":")[2].partition("/")[0])):
            return [verdict.reward for verdict in await asking], time.monotonic() - began_s

    rewards, seconds = asyncio.run(ask())
    assert rewards == [0.7, 0.7] and seconds > 0.3


def test_after_the_patience_there_is_no_verdict_and_the_reason_is_told() -> None:
    async def ask() -> None:
        fake = FakeJudge(lambda body: failing(503, "down for a while"))
        async with fake.serve() as url:
            (verdict,) = await verdicts(judged_by(url, patience_s=0.2), "x")
        assert verdict.reward is None
        assert "did not answer for 0.2 s (judge.patience_s)" in verdict.reason and "down for a while" in verdict.reason
        assert len(fake.asked) > 2

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("status", "others_are_answered", "expected"),
    [(503, True, [0, 0, 0]), (503, False, [1, 2, 3]), (429, True, [1, 2, 3])],
)
def test_pauses_grow_after_each_429_and_while_nobody_gets_an_answer(
    monkeypatch: pytest.MonkeyPatch, status: int, others_are_answered: bool, expected: list[int]
) -> None:
    """One request fails three times; beside it the judge may answer another one each time."""
    serious: list[int] = []
    monkeypatch.setattr(client, "pause_s", lambda number: serious.append(number) or 0.01)
    replies = iter([*(failing(status) for _ in range(3)), score(7)])

    async def ask() -> None:
        async def answer(body: Any) -> web.Response | str:
            if "other" in str(body):
                return score(5)
            if others_are_answered:
                await judge.ask({"messages": [{"role": "user", "content": "other"}]})
            return next(replies)

        fake = FakeJudge(answer)
        async with fake.serve() as url, client.open_client(judged_by(url)) as judge:
            await judge.ask({"messages": [{"role": "user", "content": "x"}]})

    asyncio.run(ask())
    assert serious == expected


def test_a_retry_after_of_one_address_holds_back_requests_to_the_others() -> None:
    async def ask() -> None:
        busy, free = FakeJudge(in_turn(failing(429, retry_after="0.3"), score(1))), FakeJudge(lambda body: score(7))
        async with busy.serve() as first, free.serve() as second:
            began_s = time.monotonic()
            (verdict,) = await verdicts(judged_by(first, urls=(first, second)), "x")
            assert verdict.reward == 0.7 and time.monotonic() - began_s > 0.25

    asyncio.run(ask())


def test_hosts_share_the_rate_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    rate_limit = client.RateLimit
    monkeypatch.setattr(client, "RateLimit", lambda folder, rate: rates.append(rate) or rate_limit(folder, rate))

    async def open_for(**placement: Any) -> None:
        config = changed(judged_by("http://127.0.0.1:9/v1", requests_per_minute=1200), placement=placement)
        async with client.open_client(config):
            pass

    asyncio.run(open_for())
    asyncio.run(open_for(rollout=RolloutPlacement(nodes=3, servers=3)))
    assert rates == [1200, 400]


def test_a_retry_after_holds_back_all_workers_of_the_host(tmp_path: Path) -> None:
    async def ask() -> None:
        date = email.utils.format_datetime(email.utils.localtime())
        held = FakeJudge(in_turn(failing(429, retry_after="0.3"), failing(429, retry_after=date), score(7)))
        async with held.serve() as url:
            config = changed(judged_by(url), run={"dir": str(tmp_path), "name": "r"})
            config.run_dir.mkdir()
            first = asyncio.create_task(verdicts(config, "x"))
            await asyncio.sleep(0.1)
            began_s = time.monotonic()
            await verdicts(config, "y")
            assert time.monotonic() - began_s > 0.15
            assert (await first)[0].reward == 0.7

    asyncio.run(ask())


@pytest.mark.parametrize(("status", "key"), [(401, "judge.api_key_variable"), (404, "judge.model")])
def test_an_endpoint_that_refuses_everything_fails_the_reward(status: int, key: str) -> None:
    with pytest.raises(RewardError, match=rf"refuses all requests, see .*{key}.*HTTP {status}: bad"):
        asked(lambda body: failing(status, "bad"))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (failing(400, "too long for the context"), "refused the request: HTTP 400: too long for the context"),
        (web.json_response({"choices": []}), "has no text"),
        (web.json_response({"choices": [{"message": {"content": None, "reasoning_content": "7"}}]}), "verdict: ''"),
        (web.json_response({"choices": [{"message": {"content": 7}}]}), "has no text"),
        (web.json_response({"choices": [{"message": {"content": "Score: 1"}, "finish_reason": "length"}]}), "cut off"),
        (web.json_response({"error": {"message": "oops"}}), "has no text: .*oops"),
    ],
)
def test_a_reply_without_a_verdict_costs_the_answer_alone(answer: web.Response, reason: str) -> None:
    async def ask() -> None:
        text, status = answer.text or "", answer.status
        fake = FakeJudge(lambda body: web.Response(text=text, status=status) if "wrong" in str(body) else score(7))
        async with fake.serve() as url:
            bad, good = await verdicts(judged_by(url), "wrong", "right")
        assert (bad.reward, good.reward) == (None, 0.7)
        assert re.search(reason, bad.reason), bad.reason
        assert len(fake.asked) == 2  # it is not asked again

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("content", "usage", "tokens"),
    [
        ([{"type": "thinking", "thinking": "3?"}, {"type": "text", "text": '{"score":'}, {"text": " 7}"}], None, 0),
        (score(7), [1], 0), (score(7), {"prompt_tokens": {"all": 3}}, 0), (score(7), {"prompt_tokens": 3}, 3),
    ],
)
def test_a_reply_of_another_form_is_read(content: Any, usage: Any, tokens: int) -> None:
    reply = {"choices": [{"message": {"content": content}, "finish_reason": "stop"}], "usage": usage}
    rewards, counts, _ = asked(lambda body: web.json_response(reply))
    assert rewards == [0.7] and counts["scoring/judge/prompt_tokens"] == tokens


def test_at_most_so_many_requests_are_under_way_at_once() -> None:
    async def ask() -> int:
        fake = FakeJudge(lambda body: score(7), latency_s=0.02)
        async with fake.serve() as url:
            await verdicts(judged_by(url, concurrency=3), *map(str, range(12)))
        return fake.most_at_once

    assert asyncio.run(ask()) == 3


def test_requests_are_shared_between_endpoints_and_a_dead_one_is_left_out() -> None:
    async def ask() -> None:
        one, other = FakeJudge(lambda body: score(7), 0.02), FakeJudge(lambda body: score(7), 0.02)
        async with one.serve() as first, other.serve() as second:
            await verdicts(judged_by(first, urls=(first, second)), *map(str, range(20)))
            assert len(one.asked) == len(other.asked) == 10
            found = await verdicts(judged_by(first, urls=(first, "http://127.0.0.1:9/v1")), *map(str, range(20)))
            assert [verdict.reward for verdict in found] == [0.7] * 20

    asyncio.run(ask())


def test_the_model_and_the_key_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    _, _, fake = asked(in_turn(score(7)), api_key_variable="JUDGE_KEY")
    assert fake.asked[0]["model"] == "judge-7b" and fake.headers[0]["Authorization"] == "Bearer secret"
    _, _, fake = asked(in_turn(score(7)), model="own")
    assert fake.asked[0]["model"] == "own" and "Authorization" not in fake.headers[0]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set where the rollout workers run"):
        asked(in_turn(score(7)), api_key_variable="JUDGE_KEY")


class SkippedTime(selectors.DefaultSelector):
    """A selector of an event loop whose clock jumps to the next timer instead of waiting for it."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += max(0.0, timeout or 0.0)
        return super().select(None if timeout is None else 0)


def asked_at(*began_s: float, reply: Callable[[int], str], **judge: Any) -> dict[float, str]:
    """[when the request for it began, in seconds] the score, or the reason for none, of answers of one group each.

    Time is skipped, not waited for. `reply` gets the number of each request, from 0 on, and may raise.
    """
    clock = SkippedTime()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now_s  # type: ignore[method-assign]
    numbers = itertools.count()

    async def request(self: object, method: str, url: str, body: Any) -> dict[str, Any]:
        await asyncio.sleep(0.4)
        return {"choices": [{"message": {"content": reply(next(numbers))}}]}

    async def ask() -> dict[float, str]:
        config = judged_by("http://127.0.0.1:9/v1", model="m", **judge)
        scoring = Scoring(config, open_rewards(config, None))  # type: ignore[arg-type]

        async def verdict(at_s: float) -> tuple[float, str]:
            await asyncio.sleep(at_s)
            try:
                (found,) = await scoring.score(QUESTION, [told("x")])
            except RewardError as error:
                return at_s, f"the group failed: {error}"
            return at_s, found.reason if found.reward is None else str(found.reward)

        try:
            return dict(await asyncio.gather(*map(verdict, began_s)))
        finally:
            await scoring.aclose()

    with pytest.MonkeyPatch.context() as patch, asyncio.Runner(loop_factory=lambda: loop) as runner:
        patch.setattr(client.JudgeClient, "_request", request)
        patch.setattr(rate_limit, "time", SimpleNamespace(monotonic=loop.time))
        return runner.run(ask())


def test_an_outage_with_retry_after_costs_no_group_that_came_while_it_held_all_back() -> None:
    def limited(number: int) -> str:
        raise client._PassingError("HTTP 429: slow", retry_after_s=2.0)

    found = asked_at(0.0, 0.5, 1.0, 1.9, 2.1, reply=limited, patience_s=3.0, timeout_s=0.5)
    assert {at_s: "the judge did not answer for 3 s (judge.patience_s)" in text for at_s, text in found.items()} == {
        0.0: True, 0.5: True, 1.0: True, 1.9: True, 2.1: True
    }, found  # fmt: skip


def test_a_request_that_no_attempt_was_let_through_for_says_what_held_it_back() -> None:
    def limited(number: int) -> str:
        raise client._PassingError("HTTP 429: slow", retry_after_s=3.0)

    found = asked_at(0.0, 0.2, 0.5, reply=limited, patience_s=3.0, timeout_s=0.5)  # the second asks for time up to 3.6
    assert found[0.5].endswith("(judge.patience_s): a Retry-After held the request back"), found
    assert "HTTP 429" in found[0.0], found


def test_a_request_that_is_let_through_late_may_take_as_long_as_any_other() -> None:
    def limited(number: int) -> str:
        if number == 0:
            raise client._PassingError("HTTP 429: slow", retry_after_s=3.0)
        return score(7)

    found = asked_at(0.0, 0.5, reply=limited, patience_s=3.0, timeout_s=0.5)
    assert found[0.5] == "0.7" and "HTTP 429" in found[0.0], found  # 0.1 s of its patience were left, a reply takes 0.4


def test_the_wait_for_the_ordinary_rate_is_no_part_of_the_patience() -> None:
    found = asked_at(*(number / 100 for number in range(9)), reply=lambda number: score(7), patience_s=3.0,
                     timeout_s=0.5, requests_per_minute=60.0)  # fmt: skip
    assert set(found.values()) == {"0.7"}, found  # the last one waits for 8 s
