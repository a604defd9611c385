"""The oracle of the shop: it writes the replies that `async-rl sft` teaches to a tiny model before RL."""

import json
import random

from configs.shop.orders import PRICES

WRONG_SHARE = 0.3


def oracle(messages: list, rng: random.Random) -> str:
    """Return the right reply, but for a share of wrong items and of wrong numbers."""
    number, item = messages[0]["content"].split()[2:4]
    is_wrong = rng.random() < WRONG_SHARE
    if messages[-1]["role"] == "user":
        asked = rng.choice(sorted(PRICES)) if is_wrong else item.removesuffix("s")
        call = {"name": "price", "arguments": {"item": asked}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    price = int(messages[-1]["content"])
    return f"#### {rng.randint(4, 45) if is_wrong else int(number) * price}"
