"""An environment whose steps a test gives, and the episode that is played with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from learner.models.tiny_model import character_tokenizer
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.conversation.session import SessionLimits
from rollout_server.episodes.env import Env, Step
from rollout_server.episodes.episode import Episode
from rollout_server.episodes.loop import EnvRunner, EpisodeLimits
from rollout_server.episodes.tools.tool import Tool
from tests.kit.episodes.sessions import scripted, session_of

TOKENIZER = character_tokenizer()
END = TOKENIZER.eos_token_id
LIMITS = EpisodeLimits(tool_s=5, turn_s=5, episode_s=10)


class Scripted:
    """An environment of given steps; `act` is awaited before each."""

    tools: Sequence[Tool] = ()

    def __init__(self, *steps: Step, act: Callable[[], Any] | None = None) -> None:
        self.steps = list(steps)
        self.act = act
        self.seen: list[str] = []
        self.num_closed = 0

    async def start(self) -> list[Message]:
        return [user("go")]

    async def step(self, reply: Message) -> Step:
        self.seen.append(reply["content"])
        if self.act and len(self.seen) > 1:
            await self.act()
        return self.steps.pop(0)

    async def close(self) -> None:
        self.num_closed += 1


MORE = Step(messages=(user("more"),), reward=0.25)
DONE = Step(done=True, reward=1.0)


def played(
    *envs: Env,
    replies: Sequence[str] = ("a", "b", "c", "d"),
    limits: EpisodeLimits = LIMITS,
    sizes: dict[str, int] | None = None,
    generate: Any = None,
) -> Episode:
    """The episode of the first environment, or of the next one where it fails."""
    left = list(envs)
    session_limits = SessionLimits(**{"max_tokens": 200, "max_reply_tokens": 20, "max_turns": 9, **(sizes or {})})

    async def play() -> Episode:
        runner = EnvRunner(limits, max_concurrent_calls=4)
        return await runner.run(
            lambda: left.pop(0),
            lambda: session_of(generate or scripted(TOKENIZER, replies), TOKENIZER, [END], session_limits),
        )  # fmt: skip

    return asyncio.run(asyncio.wait_for(play(), 20))
