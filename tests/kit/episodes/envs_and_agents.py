"""An engine that plays `chain` by the rules, environments that fail in different ways, an agent and a tool."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
from openai import AsyncOpenAI

from rollout_server.engines.base import GenerationRequest, Load, SampledReply
from rollout_server.episodes.conversation.messages import Message, user
from rollout_server.episodes.env import Step
from rollout_server.episodes.tools.tool import Tool
from rollout_server.question import Question
from tests.rollout_server.test_worker import TOKENIZER


class TalkingEngine:
    """Answers each request with the text that `say` makes of the last message, and of the answer's number among n.

    Tokens have the newest of the versions that the test sets and that of the request.
    """

    url, vocab_size = "", len(TOKENIZER)

    def __init__(self, say: Callable[[str, int, int], str], delay_s: float = 0.001) -> None:
        self.say = say
        self.delay_s = delay_s
        self.version = 0
        self.requests: list[GenerationRequest] = []
        self.num_running = 0

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    async def load(self) -> Load:
        return Load(running=0, slots=1)

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        self.requests.append(request)
        self.num_running += 1
        version = max(self.version, request.start_version)
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self.num_running -= 1
        last = re.split(r"<eos>|<sep>", TOKENIZER.decode(request.prompt.tokens).removesuffix("<sep>"))[-1].strip()
        texts = [self.say(last, number, request.n) for number in range(request.n)]
        return [self._completion(text, version, request.max_tokens) for text in texts]

    def _completion(self, text: str, version: int, max_tokens: int) -> SampledReply:
        tokens = TOKENIZER(text + "<eos>", add_special_tokens=False)["input_ids"][:max_tokens]
        length = len(tokens)
        return SampledReply(
            tokens=np.array(tokens, np.int32), logprobs=np.full(length, -0.5, np.float32),
            versions=np.full(length, version, np.int32),
            finish_reason="stop" if tokens[-1] == TOKENIZER.eos_token_id else "length",
        )  # fmt: skip


def follow(last: str, number: int, n: int) -> str:
    """The right reply in `chain`, but a wrong one of the first of three answers, which only the first turn asks for."""
    right = f"={last}" if last.isdecimal() else f"?{last}"
    return "?!" if (number, n) == (0, 3) else right


class Silent:
    """An environment of two turns that gives rewards in both. Its behaviour in the first turn is the index's."""

    tools: Sequence[Tool] = ()
    closed = 0

    def __init__(self, index: int) -> None:
        self._index = index
        self._turn = 0

    async def start(self) -> list[Message]:
        return [user("a")]

    async def step(self, reply: Message) -> Step:
        self._turn += 1
        if self._index % 5 == 1:
            raise KeyError("no unit")
        if self._index % 5 == 2:
            await asyncio.sleep(60)
        if self._turn == 2:
            return Step(reward=2.0, done=True, metrics={"turns_seen": 2})
        return Step(messages=[user("b")], reward=0.5)

    async def close(self) -> None:
        Silent.closed += 1


class AlwaysRaises(Silent):
    async def step(self, reply: Message) -> Step:
        raise KeyError("no unit")


async def solve(question: Question, base_url: str, api_key: str) -> float:
    """An agent that asks twice with OpenAI's client, and likes long answers."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: list[Any] = list(question.messages)
        for _ in range(2):
            reply = await client.chat.completions.create(model="policy", messages=messages, temperature=0.5)
            said = reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "more"}]
    return float(len(said))


async def _ask(question: Question, base_url: str) -> None:
    body = {"messages": list(question.messages)}
    async with aiohttp.ClientSession() as client, client.post(f"{base_url}/chat/completions", json=body) as reply:
        assert reply.status == 200


async def break_by_turns(question: Question, base_url: str, api_key: str) -> float:
    """An agent whose tool raises in every second episode."""
    await _ask(question, base_url)
    return _price("plum" if next(_numbers) % 2 else "pear")


async def break_always(question: Question, base_url: str, api_key: str) -> float:
    await _ask(question, base_url)
    return _price("plum")


async def fall_silent(question: Question, base_url: str, api_key: str) -> float:
    await _ask(question, base_url)
    await asyncio.sleep(60)
    return 1.0


async def take_a_while(question: Question, base_url: str, api_key: str) -> float:
    await asyncio.sleep(0.05)
    await _ask(question, base_url)
    return float(next(_numbers))


_numbers = itertools.count()


def _price(item: str) -> float:
    return {"pear": 5.0}[item]
