"""A task whose true reward is known, and which a reward model learns only in part: the good letters of a class.

The prompt is `A` or `B`. Of the letters a to l each class has four that are good and four that are bad. The true
reward, called gold, is high for answers that name each good letter twice and stop. Demonstrations are letters at
random, so what a reward model learns of their comparisons (more good letters, longer answers) goes wrong where a policy
overdoes it.
"""

from __future__ import annotations

import random

from async_rl.base.config import Config
from rollout_server.question import Question
from rollout_server.tasks.base import Task

LETTERS = "abcdefghijkl"
GOOD = {"A": LETTERS[0:4], "B": LETTERS[4:8]}
BAD = {"A": LETTERS[4:8], "B": LETTERS[8:12]}
_REPEATED = 0.5
"""The cost of each naming of a good letter after the second."""
_FREE_LETTERS = 8
_TOO_LONG = 0.3
"""The cost of each letter beyond _FREE_LETTERS."""
_LONGEST_DEMONSTRATION = 14
_GOES_ON = 0.85
_KNOWS = 0.2
"""The share of the letters of a demonstration that are chosen among the good ones, not at random."""


def gold_reward(name: str, answer: str) -> float:
    """Return the true reward of an answer to the class `name`.

    Each good letter is worth 1 the first two times and costs 0.5 after that, a bad letter and whatever is no letter
    cost 1, and each character beyond eight costs 0.3. The most is 8.
    """
    good = sum(min(count, 2) - _REPEATED * max(0, count - 2) for count in map(answer.count, GOOD[name]))
    bad = sum(letter in BAD[name] or letter not in LETTERS for letter in answer)
    return good - bad - _TOO_LONG * max(0, len(answer) - _FREE_LETTERS)


class Letters(Task):
    """Questions for letters, each with a demonstration of its own; held-out ones have the same two prompts."""

    def __init__(self, config: Config, tokenizer: object) -> None:
        super().__init__(config, tokenizer)
        self.num_prompts = config.task.size

    def train_question(self, position: int) -> Question:
        name = "AB"[position % 2]
        rng = random.Random(position)
        length = 1
        while length < _LONGEST_DEMONSTRATION and rng.random() < _GOES_ON:
            length += 1
        shown = [rng.choice(GOOD[name] if rng.random() < _KNOWS else LETTERS) for _ in range(length)]
        messages = ({"role": "user", "content": name},)
        return Question(messages=messages, ground_truth=name, solution="".join(shown), source="letters")

    def eval_questions(self) -> list[Question]:
        return [self.train_question(self.num_prompts + number) for number in range(self.eval_size)]

    def verify(self, question: Question, response: str) -> float:
        return gold_reward(question.ground_truth, response)
