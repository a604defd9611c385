from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from learner.models.tiny_model import character_tokenizer
from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.conversation.session import EpisodeOver, Session, SessionLimits
from rollout_server.episodes.episode import num_shared_tokens
from tests.kit.engines.fakes import completion
from tests.kit.episodes.sessions import scripted, session_of
from tests.kit.tokenizers import end_tokens, tokenizer_of

TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id


def session_with(*replies: str, **limits: int) -> Session:
    sizes = SessionLimits(**{"max_tokens": 200, "max_reply_tokens": 20, "max_turns": 9, **limits})
    return session_of(scripted(TOKENIZER, replies), TOKENIZER, [END], sizes)


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


async def ask(session: Session, *texts: str, **options: Any) -> str:
    """The reply to a conversation of the user, the model, the user, ..."""
    messages = [said(text) if i % 2 else user(text) for i, text in enumerate(texts)]
    return (await session.reply(messages, **options)).message["content"]


def shown(session: Session) -> list[tuple[str, str]]:
    """(All text, trained text) of each row."""
    return [(TOKENIZER.decode(row.tokens), TOKENIZER.decode(row.tokens[row.mask])) for row in session.rows()]


def test_a_conversation_of_three_turns_is_one_row() -> None:
    async def talk() -> Session:
        session = session_with("r1", "r2", "r3")
        assert await ask(session, "a") == "r1"
        assert await ask(session, "a", "r1", "b") == "r2"
        assert await ask(session, "a", "r1", "b", "r2", "c") == "r3"
        return session

    session = asyncio.run(talk())
    assert shown(session) == [("a<sep>r1<eos>\nb<sep>r2<eos>\nc<sep>r3<eos>", "r1<eos>r2<eos>r3<eos>")]
    (row,) = session.rows()
    # a <sep> r 1 <eos> \n b <sep> r 2 <eos> \n c <sep> r 3 <eos>
    assert row.mask.tolist() == [*[False] * 2, *([True] * 3 + [False] * 3) * 2, *[True] * 3]
    assert row.turn_ends == (4, 10, 16) and row.num_start_tokens == 2 and row.finish_reason == "stop"
    np.testing.assert_array_equal(row.logprobs, np.where(row.mask, np.float32(-0.5), 0))
    assert session.counts.rewritten == 0


def test_versions_of_observations_are_those_of_the_sampled_token_before() -> None:
    versions = iter([3, 3, 5])

    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        return completion([10, END], next(versions))

    async def talk() -> Session:
        session = session_of(generate, TOKENIZER, [END])
        text = await ask(session, "a")
        await ask(session, "a", text, "b")
        await ask(session, "a", text, "b", text, "c")
        return session

    (row,) = asyncio.run(talk()).rows()
    assert row.versions.tolist() == [3] * (2 + 2 + 3 + 2 + 3) + [5] * 2


def test_two_samples_of_one_conversation_are_two_rows() -> None:
    async def talk() -> Session:
        session = session_with("r1", "x", "y", "z")
        await ask(session, "a")
        await asyncio.gather(ask(session, "a", "r1", "b"), ask(session, "a", "r1", "b"))
        assert await ask(session, "a", "r1", "b", "y", "c") == "z"
        return session

    session = asyncio.run(talk())
    assert shown(session) == [
        ("a<sep>r1<eos>\nb<sep>x<eos>", "r1<eos>x<eos>"),
        ("a<sep>r1<eos>\nb<sep>y<eos>\nc<sep>z<eos>", "y<eos>z<eos>"),
    ]
    assert session.counts.rewritten == 0


def test_a_rewritten_history_is_a_new_root_and_masked() -> None:
    async def talk() -> Session:
        session = session_with("r1", "r2", "r3", "r4")
        await ask(session, "a")
        await ask(session, "a", "r1", "b")
        await ask(session, "summary", "r2", "c")
        await ask(session, "summary", "r2", "c", "r3", "d")
        return session

    session = asyncio.run(talk())
    assert shown(session) == [
        ("a<sep>r1<eos>\nb<sep>r2<eos>", "r1<eos>r2<eos>"),
        ("summary\nr2\nc<sep>r3<eos>\nd<sep>r4<eos>", "r3<eos>r4<eos>"),
    ]
    assert session.counts.rewritten == 1
    assert num_shared_tokens(session.rows(), 100) == 0


def test_a_failed_request_leaves_no_trace_and_its_retry_samples() -> None:
    async def talk() -> None:
        calls = 0

        async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise ConnectionError("gone")
            return completion([10, END])

        session = session_of(generate, TOKENIZER, [END], SessionLimits(max_tokens=50, max_reply_tokens=5, max_turns=1))
        with pytest.raises(ConnectionError):
            await ask(session, "a")
        assert session.rows() == []
        await ask(session, "a", is_retry=True)
        assert len(session.rows()) == 1

    asyncio.run(talk())


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_turns": 1}, "turns"), ({"max_tokens": 8}, "length"), ({"max_tokens": 7}, "length")],
)
def test_a_session_without_room_says_so_and_keeps_its_turns(limits: dict[str, int], reason: str) -> None:
    async def talk() -> None:
        session = session_with("r1", "r2", **limits)
        await ask(session, "a")  # a <sep> r 1 <eos>: 5 tokens
        with pytest.raises(EpisodeOver) as over:
            await ask(session, "a", "r1", "b")  # 3 more
        assert over.value.reason == reason
        assert shown(session) == [("a<sep>r1<eos>", "r1<eos>")]

    asyncio.run(talk())


def test_a_request_can_lower_the_limit_of_its_reply() -> None:
    rooms = []

    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        rooms.append(max_tokens)
        return completion([10, END])

    async def talk() -> None:
        session = session_of(generate, TOKENIZER, [END], SessionLimits(max_tokens=9, max_reply_tokens=5, max_turns=9))
        for asked in (None, 3, 100):
            await ask(session, "a", max_tokens=asked)
        await ask(session, "abcdef")

    asyncio.run(talk())
    assert rooms == [5, 3, 5, 2]


@pytest.mark.parametrize(
    ("max_rows", "trained"),
    [
        (3, [((4, 9), (0.5, 1.0)), ((9,), (2.0,)), ((9,), (4.0,))]),
        (2, [((9,), (1.0,)), ((4, 9), (0.5, 2.0)), ((9,), (4.0,))]),
        (1, [((9,), (1.0,)), ((9,), (2.0,)), ((4, 9), (0.5, 4.0))]),
    ],
)
def test_a_reply_that_rows_share_is_trained_in_one_that_is_kept(max_rows: int, trained: list[object]) -> None:
    async def run() -> Session:
        session = session_with("r1", "x", "y", "z", max_rows=max_rows)
        session.add_reward((await session.reply([user("a")])).turn, 0.5)
        for reward in (1.0, 2.0, 4.0):
            session.add_reward((await session.reply([user("a"), said("r1"), user("b")])).turn, reward)
        return session

    assert [(row.turn_ends, row.turn_rewards) for row in asyncio.run(run()).rows()] == trained


def test_a_reply_that_text_would_not_reproduce_stays_exact() -> None:
    """The model samples `4` and `2` apart. Tokenizing the conversation anew would make one token of them."""
    tokenizer, ends = tokenizer_of("qwen2_5"), end_tokens("qwen2_5")
    merged = tokenizer(" 42")["input_ids"]
    apart = [token for character in " 42" for token in tokenizer(character)["input_ids"]]
    assert len(merged) == 1 and len(apart) == 3 and tokenizer.decode(apart) == tokenizer.decode(merged)
    sampled = iter([[*apart, ends[0]], [*merged, ends[0]]])
    seen = []

    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        seen.append(tokens)
        return completion(next(sampled))

    async def talk() -> Session:
        session = session_of(generate, tokenizer, ends)
        text = await ask(session, "17+25?")
        await ask(session, "17+25?", text, "sure?")
        return session

    (row,) = asyncio.run(talk()).rows()
    start = len(seen[0])
    assert row.tokens[start : start + 4].tolist() == [*apart, ends[0]]
    assert row.tokens[: len(seen[1])].tolist() == seen[1]
    again = tokenizer(tokenizer.decode(row.tokens))["input_ids"]
    assert again != row.tokens.tolist() and len(again) == len(row.tokens) - 2


@pytest.mark.parametrize(("stop", "content", "kept"), [
    (["cd"], "ab", "abcd"), (["e", "bc"], "a", "abc"), (["x"], "abcdef", "abcdef<eos>"), ([], "abcdef", "abcdef<eos>"),
])  # fmt: skip
def test_a_reply_is_cut_after_the_token_that_completes_a_stop_text(stop: list[str], content: str, kept: str) -> None:
    async def talk() -> None:
        session = session_with("abcdef", "z")
        reply = await session.reply([user("a")], stop=stop)
        assert (reply.message["content"], reply.finish_reason) == (content, "stop")
        assert shown(session) == [(f"a<sep>{kept}", kept)]
        await ask(session, "a", content, "b")
        assert shown(session) == [(f"a<sep>{kept}\nb<sep>z<eos>", f"{kept}z<eos>")]

    asyncio.run(talk())
