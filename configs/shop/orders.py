"""A shop: its prices, which the agent looks up, and the orders that it is asked about.

python configs/shop/orders.py writes the orders to runs/orders.jsonl, in the schema of task.path.
"""

import json
import random
from pathlib import Path

PRICES = {
    "apple": 3, "bean": 2, "carrot": 4, "date": 6, "fig": 7, "grape": 2, "leek": 5, "melon": 9, "olive": 8, "pear": 5,
    "plum": 4, "quince": 6,
}  # fmt: skip


def price(item: str) -> int:
    """Look up the price of an item in dollars.

    Args:
        item: The name of the item, in the singular.
    """
    return PRICES[item]


def write_orders(file: Path, count: int) -> None:
    rng = random.Random(0)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lines:
        for _ in range(count):
            item, number = rng.choice(sorted(PRICES)), rng.randint(2, 5)
            row = {
                "data_source": "shop", "prompt": [{"role": "user", "content": f"What do {number} {item}s cost?"}],
                "reward_model": {"style": "rule", "ground_truth": str(number * PRICES[item])},
            }
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    write_orders(Path("runs/orders.jsonl"), 2000)
