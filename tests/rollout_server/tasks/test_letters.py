from __future__ import annotations

import pytest

from rollout_server.tasks.examples import gold_reward


@pytest.mark.parametrize(("name", "answer", "gold"), [
    ("A", "", 0.0), ("A", "abcdabcd", 8.0), ("B", "efghefgh", 8.0),
    ("A", "aaaa", 1.0),  # 2 for the first two, -0.5 for each more
    ("A", "abe", 1.0), ("A", "abi", 2.0), ("B", "abi", -1.0),  # of the three kinds of letters
    ("A", "a!", 0.0), ("A", "abcdabcdii", 7.4),  # two letters too many
])  # fmt: skip
def test_the_gold_reward_by_hand(name: str, answer: str, gold: float) -> None:
    assert gold_reward(name, answer) == pytest.approx(gold)
