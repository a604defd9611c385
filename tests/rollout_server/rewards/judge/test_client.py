"""The fate of requests when the judge limits, fails, hangs or lies: waiting, or no verdict, never a 0."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from async_rl.base.config import RolloutPlacement
from async_rl.base.errors import ConfigError, RewardError
from rollout_server.rewards import judge
from rollout_server.rewards.judge import move_judges, share_of_rate
from tests.kit.configs import changed
from tests.kit.judges import Answer, FakeJudge, in_turn, judged_by, score, verdicts, verdicts_and_counts
from tests.kit.rewards import of


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(judge, "LONGEST_PAUSE_S", 0.05)


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
    [(429, "slow", {"Retry-After": "0.02"}), (429, "slow", {"Retry-After": "Sun, 06 Nov 1994 08:49:37 GMT"}),
     (408, "", {}), (500, "oops", {}), (503, "", {}), (200, "<html>gateway</html>", {})],
)  # fmt: skip
def test_a_failure_that_passes_costs_waiting(status: int, text: str, headers: dict[str, str]) -> None:
    left = [1, 2]
    rewards, counts, fake = asked(
        lambda body: web.Response(status=status, text=text, headers=headers) if left and left.pop() else score(7)
    )
    assert rewards == [0.7] and len(fake.asked) == 3
    assert counts["scoring/judge/retries"] == 2 and counts["scoring/judge/requests"] == 3


@pytest.mark.parametrize("trickles", [False, True])
def test_a_connection_that_breaks_or_trickles_costs_waiting(trickles: bool) -> None:
    left = [1]

    async def chat(request: web.Request) -> web.StreamResponse:
        if not left:
            return web.json_response({"choices": [{"message": {"content": score(7)}}]})
        left.pop()
        response = web.StreamResponse()
        await response.prepare(request)
        while trickles:  # as gateways do to keep a connection open
            await response.write(b"\n")
            await asyncio.sleep(0.05)
        assert request.transport
        request.transport.abort()
        return response

    async def ask() -> tuple[list[float | None], dict[str, float]]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", chat)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
            found, counts = await verdicts_and_counts(judged_by(url, model="m", timeout_s=0.5), "x")
            return [verdict.reward for verdict in found], counts
        finally:
            await runner.cleanup()

    rewards, counts = asyncio.run(asyncio.wait_for(ask(), 20))
    assert rewards == [0.7] and counts["scoring/judge/requests"] == 2


def test_a_judge_that_starts_again_with_another_model_is_asked_for_its_name() -> None:
    def answer(body: dict[str, Any]) -> web.Response | str:
        if body["model"] != fake.model:
            return failing(404)
        fake.model = "second"
        return score(7)

    async def ask() -> list[float | None]:
        async with fake.serve() as url:
            return [verdict.reward for verdict in await verdicts(judged_by(url, concurrency=1), "x", "y")]

    fake = FakeJudge(answer)
    assert asyncio.run(ask()) == [0.7, 0.7] and fake.asked[-1]["model"] == "second"


@pytest.mark.parametrize("retry_after", ["", "30"])
def test_after_the_patience_there_is_no_verdict_and_the_reason_is_given(retry_after: str) -> None:
    async def ask() -> None:
        fake = FakeJudge(lambda body: failing(503, "down for a while", retry_after))
        async with fake.serve() as url:
            (verdict,), counts = await verdicts_and_counts(judged_by(url, patience_s=0.5), "x")
        assert verdict.reward is None
        assert "judge.patience_s" in verdict.reason and "down for a while" in verdict.reason
        assert len(fake.asked) <= 2 if retry_after else len(fake.asked) > 2
        assert counts["scoring/judge/requests"] == counts["scoring/judge/retries"] + 1
        assert 0 <= counts["scoring/judge/requests"] - len(fake.asked) <= 1  # the patience may end before one arrives

    asyncio.run(ask())


def test_workers_and_rewards_of_a_judge_share_the_rate_equally() -> None:
    alone = judged_by("http://h/v1", requests_per_minute=1200)
    assert share_of_rate(alone) == 1200
    assert share_of_rate(changed(alone, placement={"rollout": RolloutPlacement(servers=4)})) == 300
    both = of(
        {"reward": "judge"}, {"reward": "judge_listwise"}, {"reward": "gsm8k"},
        judge={"urls": ("http://h/v1",), "requests_per_minute": 1200},
    )  # fmt: skip
    assert share_of_rate(both) == 600


@pytest.mark.parametrize(("status", "key"), [(401, "judge.api_key_variable"), (404, "judge.model")])
def test_an_endpoint_that_refuses_everything_fails_the_reward(status: int, key: str) -> None:
    with pytest.raises(RewardError, match=key):
        asked(lambda body: failing(status, "bad"))


@pytest.mark.parametrize(
    "answer",
    [
        failing(400, "too long for the context"), web.json_response([]), web.json_response({"choices": []}),
        web.json_response({"choices": [{"message": {"content": None, "reasoning_content": "7"}}]}),
        web.json_response({"choices": [{"message": {"content": 7}}]}),
        web.json_response({"choices": [{"message": {"content": "Score: 1"}, "finish_reason": "length"}]}),
        web.json_response({"error": {"message": "oops"}}),
    ],
)
def test_a_reply_without_a_verdict_costs_the_answer_alone(answer: web.Response) -> None:
    async def ask() -> None:
        text, status = answer.text or "", answer.status
        fake = FakeJudge(lambda body: web.Response(text=text, status=status) if "wrong" in str(body) else score(7))
        async with fake.serve() as url:
            bad, good = await verdicts(judged_by(url), "wrong", "right")
        assert (bad.reward, good.reward) == (None, 0.7) and bad.reason
        assert len(fake.asked) == 2  # it is not asked again

    asyncio.run(ask())


def test_requests_are_shared_between_endpoints_and_a_dead_one_is_left_out() -> None:
    async def ask() -> None:
        one, other = FakeJudge(lambda body: score(7), 0.02), FakeJudge(lambda body: score(7), 0.02)
        async with one.serve() as first, other.serve() as second:
            await verdicts(judged_by(first, urls=(first, second)), *map(str, range(20)))
            assert len(one.asked) == len(other.asked) == 10
            found = await verdicts(judged_by(first, urls=(first, "http://127.0.0.1:9/v1")), *map(str, range(20)))
            assert [verdict.reward for verdict in found] == [0.7] * 20

    asyncio.run(ask())


def test_a_judge_that_was_started_again_elsewhere_is_asked_there() -> None:
    """A request that waits for the judge at its old place gets its verdict too."""

    async def ask() -> None:
        fake = FakeJudge(lambda body: score(7))
        async with fake.serve() as before:
            pass
        async with fake.serve() as now:
            config = changed(judged_by(before, patience_s=30), judge={"urls": (before, "http://127.0.0.1:9/v1")})
            waiting = asyncio.create_task(verdicts(config, "x"))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            move_judges(config.judge.urls, [now, "http://127.0.0.1:9/v1"])
            assert [verdict.reward for verdict in await waiting] == [0.7]
            assert [verdict.reward for verdict in await verdicts(config, "y")] == [0.7]

    asyncio.run(ask())


def test_the_model_and_the_key_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    _, _, fake = asked(in_turn(score(7)), api_key_variable="JUDGE_KEY")
    assert fake.asked[0]["model"] == "judge-7b" and fake.headers[0]["Authorization"] == "Bearer secret"
    monkeypatch.setenv("OPENAI_API_KEY", "another")
    _, _, fake = asked(in_turn(score(7)), model="own")
    assert fake.asked[0]["model"] == "own" and "another" not in str(fake.headers)
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"^judge\.api_key_variable"):
        asked(in_turn(score(7)), api_key_variable="JUDGE_KEY")
