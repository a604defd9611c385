"""Two tasks that a tiny model learns on a CPU: letters with a known true reward, and short programs."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

from async_rl.base.config import Config
from rollout_server.question import Question
from rollout_server.tasks.base import Task

LETTERS = "abcdefghijkl"
GOOD = {"A": LETTERS[0:4], "B": LETTERS[4:8]}
BAD = {"A": LETTERS[4:8], "B": LETTERS[8:12]}
_REPEATED = 0.5
"""The cost of each further use of a good letter after the second."""
_FREE_LETTERS = 8
_TOO_LONG = 0.3
"""The cost of each letter beyond _FREE_LETTERS."""
_LONGEST_DEMONSTRATION = 14
_GOES_ON = 0.85
_KNOWS = 0.2
"""The share of a demonstration's letters that are good ones; the others are random."""


def gold_reward(name: str, answer: str) -> float:
    """Return the true reward of an answer to the prompt `name`, at most 8.

    Each good letter earns 1 the first two times and costs 0.5 after that. Any other character that is a bad letter or
    no letter costs 1. Each character beyond eight costs 0.3.
    """
    good = sum(min(count, 2) - _REPEATED * max(0, count - 2) for count in map(answer.count, GOOD[name]))
    bad = sum(letter in BAD[name] or letter not in LETTERS for letter in answer)
    return good - bad - _TOO_LONG * max(0, len(answer) - _FREE_LETTERS)


class Letters(Task):
    """A task to study over-optimisation: its true reward is known, and a reward model learns only a part of it.

    The prompt is a class, `A` or `B`. Each class has four good and four bad letters out of a to l. The true reward,
    called gold, is high for answers that name each good letter twice and then stop. The demonstrations are nearly
    random letters. From comparisons of them a reward model learns that more good letters and longer answers are better.
    A policy that overdoes this gets a low gold reward.
    """

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


_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
_CONSTANTS = range(1, 5)
_SHOWN = range(2, 10)
_TESTED = (2, 7, 9, 12, 20)
_HELD_OUT_EVERY = 5
_STRIDE = 389
"""Questions are taken in steps of this prime, so that neighbours differ."""


class Programs(Task):
    """A task of short programs: find the expression that maps each given number to its result.

    The prompt `3>6 5>10` asks for `x*2`. The reward `code`, whose setting `wrap` makes a program of the expression,
    runs it on other numbers too: see configs/code_cpu.yaml. Every fifth question is held out.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        made = [
            _question(operation, constant, first, second)
            for operation, constant in itertools.product(_OPERATIONS, _CONSTANTS)
            for first, second in itertools.permutations(_SHOWN, 2)
        ]
        mixed = [made[number * _STRIDE % len(made)] for number in range(len(made))]
        self._held_out = mixed[::_HELD_OUT_EVERY]
        self._train = [each for number, each in enumerate(mixed) if number % _HELD_OUT_EVERY]
        self.num_prompts = len(self._train)

    def train_question(self, position: int) -> Question:
        return self._train[position]

    def eval_questions(self) -> list[Question]:
        return self._held_out[: self.eval_size]

    def verify(self, question: Question, response: str) -> float:
        """Return 1 if the answer is exactly the expression that the question was made with. It runs nothing."""
        return float(response.strip() == question.solution)


def _question(operation: str, constant: int, first: int, second: int) -> Question:
    apply = _OPERATIONS[operation]
    shown = f"{first}>{apply(first, constant)} {second}>{apply(second, constant)}"
    tests = {
        "inputs": [" ".join(map(str, _TESTED))],
        "outputs": ["\n".join(str(apply(number, constant)) for number in _TESTED)],
    }
    return Question(
        messages=({"role": "user", "content": shown},), ground_truth=json.dumps(tests),
        solution=f"x{operation}{constant}", source="programs",
    )  # fmt: skip
