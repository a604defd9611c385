"""Environments that would end the event loop, or break their interface: each fails its own episode, with a sentence."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollout_server.episodes.conversation.messages import Message
from rollout_server.episodes.env import Env, Step
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.players.env_runner import EnvRunner
from tests.kit.episodes.scripted_env import DONE, END, LIMITS, MORE, TOKENIZER, Scripted, played
from tests.kit.episodes.sessions import scripted, session_of


def test_a_step_that_is_a_plain_def_is_told() -> None:
    class Plain(Scripted):
        def step(self, reply: Message) -> Step:  # type: ignore[override]
            return DONE

    episode = played(Plain(), Plain())
    assert episode.error.startswith("the environment's step must be an `async def`, got a `def` that returned Step(")


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
        assert (episode.end, episode.error) == ("failed", f"the environment's {what} raised {said}, at {place}")
        assert episode.metrics["failed"] == 2 and "Traceback" in episode.traceback
    assert (other.end, other.reward) == ("done", 1.0)


def test_a_constructor_that_exits_fails_its_episode() -> None:
    def make() -> Env:
        raise SystemExit("no licence")

    async def play() -> Episode:
        return await EnvRunner(LIMITS, 1).run(make, lambda: session_of(scripted(TOKENIZER, []), TOKENIZER, [END]))

    assert "the environment can't be created: SystemExit: no licence, at " in asyncio.run(play()).error


def test_errors_are_of_one_kind_if_they_come_from_one_place_whatever_they_say() -> None:
    def kind_of(*steps: Any) -> str:
        return played(Scripted(*steps), Scripted(*steps), sizes={"max_tokens": 13, "max_turns": 2}).error_kind

    assert kind_of({"reward": 0.6}) == kind_of({"reward": 0.7})
    kinds = {
        kind_of(step) for step in (
            Step(done=True, reward=float("nan")), Step(done=True, metrics={"a": float("nan")}), Step(), {"reward": 0.6},
            MORE,
        )
    }  # fmt: skip
    assert len(kinds) == 5
