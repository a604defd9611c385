"""A task of short programs: find the expression that turns numbers into the numbers shown.

The prompt `3>6 5>10` asks for `x*2`. The program is run on other numbers too, by the reward `code`, whose settings
`wrap` the expression: see configs/code_cpu.yaml.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from async_rl.base.config import Config
from rollout_server.question import Question
from rollout_server.tasks.base import Task

_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
_CONSTANTS = range(1, 5)
_SHOWN = range(2, 10)
_TESTED = (2, 7, 9, 12, 20)
_HELD_OUT_EVERY = 5
_STRIDE = 389
"""Questions are taken in steps of this prime, so that neighbours differ."""


class Programs(Task):
    """Questions for expressions `x<operation><constant>`. Every fifth is held out."""

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
        """Return whether the answer is the expression that the question was made with, without running it."""
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
