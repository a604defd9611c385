from __future__ import annotations

import pytest

from rollout_server.tasks.letters import Letters, gold_reward
from tests.kit.configs import make_config
from tests.kit.engines.fakes import TOKENIZER


@pytest.mark.parametrize(("name", "answer", "gold"), [
    ("A", "", 0.0), ("A", "abcdabcd", 8.0), ("B", "efghefgh", 8.0),
    ("A", "aaaa", 1.0),  # 2 for the first two, -0.5 for each more
    ("A", "abe", 1.0), ("A", "abi", 2.0), ("B", "abi", -1.0),  # of the three kinds of letters
    ("A", "a!", 0.0), ("A", "abcdabcdii", 7.4),  # two letters too many
])  # fmt: skip
def test_the_gold_reward_by_hand(name: str, answer: str, gold: float) -> None:
    assert gold_reward(name, answer) == pytest.approx(gold)


def test_demonstrations_are_mediocre_and_held_out_ones_are_others() -> None:
    config = make_config(task={"name": "rollout_server.tasks.letters:Letters", "size": 400}, eval={"num_prompts": 100})
    task = Letters(config, TOKENIZER)
    shown = [task.train_question(number) for number in range(task.num_prompts)]
    assert [each.messages[0]["content"] for each in shown[:3]] == ["A", "B", "A"]
    assert shown == [task.train_question(number) for number in range(400)]
    gold = [task.verify(each, each.solution) for each in shown]
    assert -1 < sum(gold) / len(gold) < 0.5
    assert min(len(each.solution) for each in shown) >= 1 and max(len(each.solution) for each in shown) == 14
    held_out = task.eval_questions()
    assert len(held_out) == 100 and {each.ground_truth for each in held_out} == {"A", "B"}
