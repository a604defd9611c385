"""What training adds to the agent of the shop: `solve` for RL, and `oracle` for the warm start of a tiny model."""

import json
import random

from openai import AsyncOpenAI, BadRequestError

from configs.shop.agent import answer
from configs.shop.orders import PRICES

WRONG_SHARE = 0.3

CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="")  # one for all: to construct one takes 20 ms of CPU


async def solve(question, base_url: str, api_key: str) -> float:
    """Return the reward of one episode: 1 for the right number after ####, else 0."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    try:
        text = await answer(client, list(question.messages))
    except BadRequestError:  # the policy used up its turns or its room: it has failed, not the agent
        return 0.0
    return float(text.rpartition("####")[2].strip() == question.answer)


def oracle(messages: list, rng: random.Random) -> str:
    """Return a reply to learn before RL: the right one, but for a share of wrong items and wrong products."""
    number, item = messages[0]["content"].split()[2:4]
    is_wrong = rng.random() < WRONG_SHARE
    if messages[-1]["role"] == "user":
        asked = rng.choice(sorted(PRICES)) if is_wrong else item.removesuffix("s")
        call = {"name": "price", "arguments": {"item": asked}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    price = int(messages[-1]["content"])
    return f"#### {rng.randint(4, 45) if is_wrong else int(number) * price}"
