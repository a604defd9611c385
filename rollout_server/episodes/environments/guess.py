"""The environment `guess`: find a secret number in a few guesses. It needs planning, and all episodes are short.

    ? ──► 15 ──► h ──► 23 ──► l ──► 19          h: the secret number is higher than the guess, l: it is lower
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step
from rollout_server.episodes.tools.tool import Tool

HIGHEST = 30
MAX_GUESSES = 5
"""Bisection finds each number of 0..30 in at most five guesses."""


class Guess:
    """One episode of `guess`, a class for `task.env`. The reward is 1 if the model finds the number.

    It is 0 if the model runs out of guesses, or writes anything but a number of two digits.

    Args:
        index: the prompt's index. It determines the number.
    """

    tools: Sequence[Tool] = ()

    def __init__(self, index: int) -> None:
        self._secret = random.Random(f"guess {index}").randint(0, HIGHEST)
        self._num_guesses = 0

    async def start(self) -> list[Message]:
        return [user("?")]

    async def step(self, reply: Message) -> Step:
        self._num_guesses += 1
        text = reply["content"]
        if not is_guess(text):
            return Step(done=True)
        if int(text) == self._secret:
            return Step(done=True, reward=1.0, metrics={"guesses": self._num_guesses})
        if self._num_guesses == MAX_GUESSES:
            return Step(done=True)
        return Step(messages=(user("h" if self._secret > int(text) else "l"),))

    async def close(self) -> None:
        pass


def is_guess(text: str) -> bool:
    """Return whether the text is a number of two digits."""
    return len(text) == 2 and text.isascii() and text.isdecimal()


def oracle(messages: Sequence[Message], rng: random.Random) -> str:
    """Return a guess for supervised fine-tuning: a random one of the numbers still possible.

    It solves over half of them.
    """
    low, high = 0, HIGHEST
    for said, answer in zip(messages[1::2], messages[2::2], strict=True):
        guess = int(said["content"])
        low, high = (guess + 1, high) if answer["content"] == "h" else (low, guess - 1)
    return f"{rng.randint(low, high):02d}"
