"""Environments that would end the event loop, or break their interface: each fails its own episode, with a sentence."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rollout_server.episodes.conversation.chat_messages import Message
from rollout_server.episodes.conversation.rendering import TurnRenderer
from rollout_server.episodes.conversation.reply_reader import JsonParser, ReplyReader
from rollout_server.episodes.conversation.session import Session, SessionLimits
from rollout_server.episodes.env import Env, Step
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EnvRunner
from tests.kit.episodes.scripted_env import DONE, END, LIMITS, MORE, TOKENIZER, Scripted
from tests.kit.episodes.sessions import scripted, session_of
from tests.kit.tokenizers import end_tokens, tokenizer_of


async def exit_by_argparse() -> None:
    argparse.ArgumentParser().parse_args(["--unknown"])


async def cancel_itself() -> None:
    raise asyncio.CancelledError


async def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("act", "said"),
    [(exit_by_argparse, "SystemExit: 2"), (cancel_itself, "CancelledError"), (interrupt, "KeyboardInterrupt")],
)
def test_an_environment_that_would_end_the_event_loop_fails_alone(act: Any, said: str) -> None:
    """Also in `start` and `close`, and beside another episode, which is played to its end."""

    class Ends(Scripted):
        async def start(self) -> list[Message]:
            await act()
            return []

        async def close(self) -> None:
            await act()

    async def play() -> list[Episode]:
        runner = EnvRunner(LIMITS, 8)

        async def run(make: Callable[[], Env]) -> Episode:
            return await runner.run(make, lambda: session_of(scripted(TOKENIZER, ["a", "b"]), TOKENIZER, [END]))

        return await asyncio.gather(run(lambda: Scripted(MORE, DONE, act=act)), run(Ends), run(lambda: Scripted(DONE)))

    in_step, in_start, other = asyncio.run(play())
    line = act.__code__.co_firstlineno + 1
    for episode, what in ((in_step, "step"), (in_start, "start")):
        place = f"{__file__}:{line}"
        assert episode.end == "failed" and episode.error.endswith(f"{what} raised {said}, at {place}")
        assert episode.metrics["failed"] == 2 and "Traceback" in episode.traceback
    assert (other.end, other.reward) == ("done", 1.0)


def price(item: str) -> int:
    """Look up a price.

    Args:
        item: its name.
    """
    return {"pear": 5}[item]


class Shop(Scripted):
    """An environment with these tools, whose step gets the results that the model has seen."""

    def __init__(self, *tools: Any, steps: Sequence[Step] = (DONE,)) -> None:
        super().__init__(*steps)
        self.tools = tools


def test_a_function_among_the_tools_of_an_environment_is_a_tool() -> None:
    tokenizer, ends = tokenizer_of("qwen2_5"), end_tokens("qwen2_5")
    replies = ['<tool_call>{"name": "price", "arguments": {"item": "pear"}}</tool_call>', "It is 5."]

    def opened() -> Session:
        reader = ReplyReader(tokenizer, ends, JsonParser("hermes"))
        sizes = SessionLimits(max_tokens=900, max_reply_tokens=100, max_turns=9)
        return Session(scripted(tokenizer, replies), TurnRenderer(tokenizer, ends), reader, sizes)

    episode = asyncio.run(EnvRunner(LIMITS, 4).run(lambda: Shop(price), opened))
    assert (episode.end, episode.answer) == ("done", "It is 5."), episode.error
    assert episode.messages[-2]["content"] == "5"
