"""Environments and agents for the worker, most of which fail in one way."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import aiohttp

from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step
from rollout_server.episodes.tools.tool import Tool
from rollout_server.question import Question

CASES = __name__


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


async def take_a_while(question: Question, base_url: str, api_key: str) -> float:
    await asyncio.sleep(0.05)
    await _ask(question, base_url)
    return float(next(_numbers))


_numbers = itertools.count()


def _price(item: str) -> float:
    return {"pear": 5.0}[item]


def no_reward(*_: Any) -> float:
    raise AssertionError("the environment gives the rewards")
