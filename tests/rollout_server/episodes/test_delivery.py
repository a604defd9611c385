"""A reply is received once or never: retries, callers that go away, and replies that nobody fetches."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import aiohttp
import pytest

from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import user
from rollout_server.episodes.conversation.session import EpisodeOver, Session, SessionLimits
from rollout_server.episodes.endpoint.server import AgentEndpoint, OpenSession
from tests.kit.engines.fakes import completion
from tests.kit.episodes.endpoint import ASK, ENDS, post, with_session
from tests.kit.episodes.endpoint import TOKENIZER as QWEN
from tests.kit.episodes.sessions import session_of

TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id


class HeldEngine:
    """Answers its n-th request with the text `n`, once the test lets it."""

    def __init__(self, tokenizer: Any = TOKENIZER, end: int = END) -> None:
        self.tokenizer, self.end = tokenizer, end
        self.numbers = itertools.count()
        self.may_answer = asyncio.Event()
        self.num_running = 0

    async def generate(self, tokens: list[int], max_tokens: int) -> SampledReply:
        text = self.tokenizer(str(next(self.numbers)), add_special_tokens=False)["input_ids"]
        self.num_running += 1
        try:
            await self.may_answer.wait()
        finally:
            self.num_running -= 1
        return completion([*text, self.end])


def session_with(engine: HeldEngine, max_turns: int = 9) -> Session:
    limits = SessionLimits(max_tokens=200, max_reply_tokens=8, max_turns=max_turns)
    return session_of(engine.generate, TOKENIZER, [END], limits)


async def ask(session: Session, text: str = "a", **options: Any) -> str:
    return (await session.reply([user(text)], **options)).message["content"]


async def begun(session: Session, text: str = "a", **options: Any) -> asyncio.Task[str]:
    """A request that waits for its reply."""
    asking = asyncio.create_task(ask(session, text, **options))
    for _ in range(3):
        await asyncio.sleep(0)
    return asking


async def gone(asking: asyncio.Task[str]) -> None:
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def trained(session: Session) -> list[str]:
    return sorted(TOKENIZER.decode(row.tokens[row.mask], skip_special_tokens=True) for row in session.rows())


@pytest.mark.parametrize("is_retry", [True, False])
@pytest.mark.parametrize("is_sampled", [True, False], ids=["sampled", "under_way"])
def test_the_next_equal_request_gets_the_reply_whose_caller_has_gone(is_retry: bool, is_sampled: bool) -> None:
    async def talk() -> None:
        engine = HeldEngine()
        session = session_with(engine)
        await gone(await begun(session))
        if is_sampled:
            engine.may_answer.set()
            await asyncio.sleep(0.01)
            assert session.num_undelivered == 1 and session.rows() == []
        again = await begun(session, is_retry=is_retry)
        engine.may_answer.set()
        assert await again == "0" and session.counts.joined == 1
        assert await ask(session, is_retry=is_retry) == "1"  # one that was received is not given again
        assert trained(session) == ["0", "1"] and session.num_undelivered == 0

    asyncio.run(talk())


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_retry_waits_whether_its_earlier_request_is_received(is_lost: bool) -> None:
    """The end of a connection may be noticed only when the reply can't be written to it."""

    async def talk() -> None:
        engine = HeldEngine()
        session = session_with(engine)

        async def write() -> None:
            async with session.offer([user("a")]):
                if is_lost:
                    raise ConnectionError

        writing = asyncio.create_task(write())
        await asyncio.sleep(0)
        again = await begun(session, is_retry=True)
        assert engine.num_running == 1
        engine.may_answer.set()
        assert await again == ("0" if is_lost else "1")
        await asyncio.gather(writing, return_exceptions=True)
        assert trained(session) == (["0"] if is_lost else ["0", "1"])

    asyncio.run(talk())


def test_a_reply_that_nobody_fetches_is_not_trained_and_gives_its_turn_back() -> None:
    async def talk() -> None:
        engine = HeldEngine()
        engine.may_answer.set()
        session = session_with(engine, max_turns=1)
        await gone(await begun(session, "lost"))
        await asyncio.sleep(0.01)
        assert await ask(session, "b") == "1"
        with pytest.raises(EpisodeOver) as over:
            await ask(session, "lost")
        assert over.value.reason == "turns"
        await session.close()
        assert trained(session) == ["1"] and session.last_answer == "1"
        assert (session.num_turns, session.num_sampled_tokens, session.num_undelivered) == (1, 2, 1)

    asyncio.run(talk())


def test_the_end_of_the_session_ends_the_wait_of_a_retry() -> None:
    async def talk() -> None:
        session = session_with(HeldEngine())
        asking = [await begun(session), await begun(session, is_retry=True)]
        await session.close()
        first, retry = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(first, asyncio.CancelledError) and isinstance(retry, EpisodeOver)
        assert retry.reason == "ended"

    asyncio.run(talk())


async def hang_up(opened: OpenSession, engine: HeldEngine, body: dict[str, Any]) -> None:
    """Send a request, and close its connection as soon as the engine samples the reply."""
    async with aiohttp.ClientSession() as http:
        asking = asyncio.create_task(http.post(f"{opened.base_url}/chat/completions", json=body).__aenter__())
        while not engine.num_running:
            await asyncio.sleep(0)
        await gone(asking)
    while opened.num_running:
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("header", [{}, {"x-stainless-retry-count": "1"}])
def test_a_reply_whose_connection_broke_goes_to_the_next_equal_request(stream: bool, header: dict[str, str]) -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        await hang_up(opened, engine, {**ASK, "stream": stream})
        engine.may_answer.set()
        _, body, _ = await post(opened, ASK, **header)
        assert body["choices"][0]["message"]["content"] == "0"
        _, body, _ = await post(opened, ASK, **header)
        assert body["choices"][0]["message"]["content"] == "1"
        endpoint.end(opened.key)
        assert (endpoint.counts["joined"], endpoint.counts["undelivered"]) == (1, 0)

    engine = HeldEngine(QWEN, ENDS[0])
    session = with_session(agent, generate=engine.generate)
    assert session.num_turns == len(session.rows()) == 2
