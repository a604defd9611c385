from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence

import pytest

from rollout_server.episodes.conversation.chat_messages import Message
from rollout_server.episodes.env import Env
from rollout_server.episodes.environments import chain, guess


def play(env: Env, policy: Callable[[list[Message]], str]) -> tuple[float, int]:
    """(Reward, number of turns) of an episode."""

    async def run() -> tuple[float, int]:
        messages, reward, num_turns = list(await env.start()), 0.0, 0
        while True:
            reply = Message(role="assistant", content=policy(messages))
            step = await env.step(reply)
            reward, num_turns = reward + step.reward, num_turns + 1
            if step.done:
                return reward, num_turns
            messages += [reply, *step.messages]

    return asyncio.run(run())


def bisect(messages: Sequence[Message]) -> str:
    low, high = 0, guess.HIGHEST
    for said, answer in zip(messages[1::2], messages[2::2], strict=True):
        middle = int(said["content"])
        low, high = (middle + 1, high) if answer["content"] == "h" else (low, middle - 1)
    return f"{(low + high) // 2:02d}"


def test_bisection_finds_every_number() -> None:
    played = [play(guess.Guess(index), bisect) for index in range(100)]
    assert {reward for reward, _ in played} == {1.0} and max(turns for _, turns in played) == 5


def test_who_follows_the_chain_finds_its_digit() -> None:
    def follow(messages: list[Message]) -> str:
        seen = messages[-1]["content"]
        return ("=" if seen.isdecimal() else "?") + seen

    played = [play(chain.Chain(index, mean_s=0), follow) for index in range(1000)]
    assert {reward for reward, _ in played} == {1.0}
    links = [turns - 1 for _, turns in played]
    assert min(links) == 1 and max(links) == chain.MAX_LINKS
    # P(links >= n) = n^-1.1 for n up to 30: a mean of the sum of these, 3.7.
    expected = sum(n**-chain.TAIL_EXPONENT for n in range(1, chain.MAX_LINKS + 1))
    assert statistics.mean(links) == pytest.approx(expected, rel=0.12)
