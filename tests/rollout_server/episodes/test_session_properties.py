"""Random conversations with rewrites, retries and aborts: what is trained is what a caller has received, once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import ReplyReader
from rollout_server.episodes.conversation.session import EpisodeOver, Session, SessionLimits
from rollout_server.episodes.episode import WholeRow, num_shared_tokens
from tests.kit.engines.fakes import completion
from tests.kit.episodes.sessions import RandomEngine
from tests.kit.tokenizers import FAMILIES, end_tokens, tokenizer_of

pytestmark = pytest.mark.processes  # together they compute for long

WORDS = [
    "fox",
    "42",
    "\n\n1",
    "",
    " ",
    "<|im_end|>",
    "<|eot_id|>x",
    "<|user|>",
    "</think>",
    '{"a": 1}',
    "\u2402reply\u2402",
]
LIMITS = SessionLimits(max_tokens=400, max_reply_tokens=6, max_turns=12)


class Talk:
    """Drives one session at random, and remembers the conversations that it may continue."""

    def __init__(self, family: str, seed: int) -> None:
        tokenizer, ends = tokenizer_of(family), end_tokens(family)
        self.rng = random.Random(seed)
        self.engine = RandomEngine(seed, len(tokenizer), ends)
        self.session = Session(
            self.engine.generate, TurnRenderer(tokenizer, ends), ReplyReader(tokenizer, ends, None), LIMITS
        )
        self.known: list[list[Message]] = []
        self.received: list[int] = []
        """The numbers of the replies that a caller has received."""

    def message(self, *roles: str) -> Message:
        return {"role": self.rng.choice(roles), "content": "".join(self.rng.choices(WORDS, k=3))}

    def conversation(self) -> list[Message]:
        if not self.known or self.rng.random() < 0.1:
            return [user("start")]
        messages = list(self.rng.choice(self.known))
        if self.rng.random() < 0.15:
            messages[self.rng.randrange(len(messages))]["content"] += "!"  # history that is rewritten
        return messages + [self.message("user", "tool", "user") for _ in range(self.rng.randint(1, 2))]

    async def step(self) -> None:
        messages = [Message(**message) for message in self.conversation()]
        action = self.rng.choice(["ask", "ask", "ask", "retry", "fork", "abandon", "return"])
        asks = [asyncio.create_task(self.ask(messages))]
        if action == "retry":
            asks.append(asyncio.create_task(self.ask(messages, is_retry=True)))
        elif action == "fork":
            asks.append(asyncio.create_task(self.ask(messages)))
        elif action in ("abandon", "return"):
            for _ in range(self.rng.randint(1, 4)):  # while it is sampled, or once it was
                await asyncio.sleep(0)
            asks[0].cancel()
        await asyncio.gather(*asks, return_exceptions=action in ("abandon", "return"))
        if action == "return":
            await self.ask(messages, is_retry=self.rng.random() < 0.5)

    async def ask(self, messages: list[Message], is_retry: bool = False) -> None:
        try:
            reply = await self.session.reply(messages, is_retry=is_retry)
        except EpisodeOver:
            return
        assert reply.turn not in self.received
        self.received.append(reply.turn)
        self.known.append([*messages, reply.message])


async def talked(family: str, seed: int, num_steps: int) -> Talk:
    talk = Talk(family, seed)
    for _ in range(num_steps):
        await talk.step()
    if talk.rng.random() < 0.3:  # ended with a request under way
        asking = asyncio.create_task(talk.ask([user("last")]))
        await asyncio.sleep(0)
        await talk.session.close()
        await asyncio.gather(asking, return_exceptions=True)
    else:
        await asyncio.sleep(0.001)  # abandoned requests end
        await talk.session.close()
    return talk


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 15))
def test_rows_hold_exactly_what_the_engine_saw_and_sampled(family: str, seed: int, num_steps: int) -> None:
    talk = asyncio.run(talked(family, seed, num_steps))
    rows, calls = talk.session.rows(), [talk.engine.calls[turn] for turn in talk.received]
    assert len(calls) == talk.session.num_turns <= LIMITS.max_turns
    assert len(talk.engine.calls) == talk.session.num_turns + talk.session.num_undelivered
    for seen, reply in calls:  # each call is a stretch of some row, at the right place
        sequence = [*seen, *reply.tokens.tolist()]
        assert any(row.tokens[: len(sequence)].tolist() == sequence for row in rows)
    # Every sampled token has a logprob of its own, so each must be found at one place of one row.
    expected = Counter(
        (token, logprob, version)
        for _, reply in calls
        for token, logprob, version in zip(
            reply.tokens.tolist(), reply.logprobs.tolist(), reply.versions.tolist(), strict=True
        )
    )
    trained = Counter(
        (token, logprob, version)
        for row in rows
        for token, logprob, version in zip(
            *(column[row.mask].tolist() for column in (row.tokens, row.logprobs, row.versions)), strict=True
        )
    )
    assert trained == expected and all(count == 1 for count in trained.values())
    for row in rows:
        check_row(row)


def check_row(row: WholeRow) -> None:
    assert row.mask[-1] and not row.mask[: row.num_start_tokens].any()
    assert (row.logprobs[~row.mask] == 0).all() and (row.logprobs[row.mask] < 0).all()
    assert (np.diff(row.versions) >= 0).all()
    assert len(row.tokens) == len(row.logprobs) == len(row.versions) == len(row.mask) <= LIMITS.max_tokens
    assert row.mask[list(row.turn_ends)].all() and row.turn_ends[-1] == len(row.tokens) - 1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 15), limit=st.integers(1, 60))
def test_the_prompt_of_a_group_is_shared_and_holds_no_sampled_token(seed: int, num_steps: int, limit: int) -> None:
    rows = asyncio.run(talked("qwen2_5", seed, num_steps)).session.rows()
    if not rows:
        return
    length = num_shared_tokens(rows, limit)
    starts = [row.tokens[: row.num_start_tokens].tolist() for row in rows]
    longest = next(n for n in range(1000) if n == min(map(len, starts)) or len({s[n] for s in starts}) > 1)
    assert length == min(limit, longest)


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "llama3_2"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), num_turns=st.integers(1, 6))
def test_plain_replies_read_as_the_template_writes_the_conversation(family: str, seed: int, num_turns: int) -> None:
    """The appended tokens, decoded, are the text of the whole conversation as the template renders it at once."""
    tokenizer, (end, *_) = tokenizer_of(family), end_tokens(family)
    rng, words = random.Random(seed), ["fox", " jumps", "42", ".", "1.", "lazy"]

    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        text = "It is " + "".join(rng.choices(words, k=3))
        apart = [token for character in text for token in tokenizer(character)["input_ids"]]
        return completion([*apart, end])

    async def talk() -> tuple[Session, list[Message]]:
        session = Session(generate, TurnRenderer(tokenizer, [end]), ReplyReader(tokenizer, [end], None), LIMITS)
        messages: list[Message] = [{"role": "system", "content": "Be brief."}]
        for _ in range(num_turns):
            messages.append(user("Is it " + "".join(rng.choices(words, k=3))))
            messages.append((await session.reply(messages)).message)
        return session, messages

    session, messages = asyncio.run(talk())
    (row,) = session.rows()
    whole = tokenizer.apply_chat_template(messages, tokenize=False, date_string="26 Jul 2024")
    # Qwen3's template writes an empty <think> part into the last reply, which the model did not say.
    assert whole.replace("<think>\n\n</think>\n\n", "").rstrip("\n") == tokenizer.decode(row.tokens)
