"""The tool of the benchmark of episodes, and its calls: the random replies of an untrained model are read as calls.

Everything follows from the text of a reply, so that the same episodes can be played again without the model: whether it
is a call, and how long its tool takes, which is lognormal.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Sequence
from zlib import crc32

from rollout_server.episodes.conversation.chat_messages import Schema
from rollout_server.episodes.conversation.reply_reader import Parsed

MEAN_S = 1.0
CV = 1.5
"""The standard deviation of a tool's time over its mean."""
REPLIES_PER_ANSWER = 4
"""One reply of so many, on average, is the answer that ends the episode. The others are calls."""


class Hang:
    """Makes one call of the tool hang: the next one while `is_due`, which that call resets."""

    is_due = False


async def look_up(key: int) -> str:
    """Look something up.

    Args:
        key: Its number.
    """
    if Hang.is_due:
        Hang.is_due = False
        await asyncio.Event().wait()
    await asyncio.sleep(look_up_s(key))
    return "found"


def look_up_s(key: int) -> float:
    """Return the seconds that `look_up(key)` takes: lognormal over the keys, and the same for the same key."""
    sigma = math.sqrt(math.log(1 + CV * CV))
    return random.Random(key).lognormvariate(math.log(MEAN_S) - sigma**2 / 2, sigma)


async def read_reply(text: str, tools: Sequence[Schema]) -> Parsed:
    """Return a random reply read as a call of `look_up` or, one in REPLIES_PER_ANSWER, as an answer without a call."""
    key = call_key(text)
    return Parsed(text) if key is None else Parsed("", (("look_up", json.dumps({"key": key})),))


def call_key(text: str) -> int | None:
    """Return the argument of the call as which a reply is read; None if it is read as an answer."""
    key = crc32(text.encode())
    return key if key % REPLIES_PER_ANSWER else None
