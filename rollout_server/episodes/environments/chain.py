"""The environment `chain`: look up a letter, then the letter that came back, until a digit comes; answer the digit.

    k ──► ?k ──► w ──► ?w ──► 7 ──► =7

Its episodes have heavy tails by design: the number of links has a Pareto distribution, the time of a look-up a
lognormal one. So it shows the cost of long-tailed episodes at each staleness bound.
"""

from __future__ import annotations

import asyncio
import math
import random
import string
from collections.abc import Sequence

from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.env import Step
from rollout_server.episodes.tools.tool import Tool

MAX_LINKS = 30
TAIL_EXPONENT = 1.1
WRONG_SHARE = 0.2


class Chain:
    """One episode of `chain`, a class for `task.env`. Answering the digit at the end of the chain earns 1, all else 0.

    A reply that is not the next look-up ends the episode.

    Args:
        index: the prompt's index. It determines the chain.
        seed: determines, together with `index`, how long look-ups take.
        mean_s: the mean time of a look-up. 0: no waiting.
        cv: the standard deviation of that time, divided by its mean.
    """

    tools: Sequence[Tool] = ()

    def __init__(self, index: int, seed: int = 0, mean_s: float = 0.02, cv: float = 1.5) -> None:
        rng = random.Random(f"chain {index}")
        num_links = min(MAX_LINKS, int((1 - rng.random()) ** (-1 / TAIL_EXPONENT)))
        letters = [rng.choice(string.ascii_lowercase) for _ in range(num_links)]
        self._links = [*letters, rng.choice(string.digits)]
        self._mean_s = mean_s
        self._sigma = math.sqrt(math.log(1 + cv * cv))
        self._times = random.Random(f"{index} {seed}")
        self._at = 0

    async def start(self) -> list[Message]:
        return [user(self._links[0])]

    async def step(self, reply: Message) -> Step:
        seen = self._links[self._at]
        if seen.isdecimal():
            return Step(done=True, reward=float(reply["content"] == f"={seen}"), metrics={"links": self._at})
        if reply["content"] != f"?{seen}":
            return Step(done=True, metrics={"links": self._at})
        await asyncio.sleep(self._look_up_s())
        self._at += 1
        return Step(messages=(user(self._links[self._at]),))

    async def close(self) -> None:
        pass

    def _look_up_s(self) -> float:
        """Return a lognormal time with the given mean and coefficient of variation."""
        if self._mean_s == 0:
            return 0.0
        return self._times.lognormvariate(math.log(self._mean_s) - self._sigma**2 / 2, self._sigma)


def oracle(messages: Sequence[Message], rng: random.Random) -> str:
    """Return a reply for supervised fine-tuning: the right one, but a WRONG_SHARE of look-ups are random letters."""
    seen = messages[-1]["content"]
    if seen.isdecimal():
        return f"={seen}"
    return "?" + (rng.choice(string.ascii_lowercase) if rng.random() < WRONG_SHARE else seen)
