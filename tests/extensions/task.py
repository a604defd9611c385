"""A task from outside the packages: `task.name: tests.extensions.task:Additions`."""

from __future__ import annotations

from typing import Any

from async_rl.config import Config
from rollout_server.question import Question
from rollout_server.tasks.base import Task


class Additions(Task):
    """Sums of two numbers up to task.params.largest. The held-out sums begin with 0, the training sums with 1."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.num_prompts = config.task.params["largest"] + 1
        self.num_held_out = min(config.eval.size, self.num_prompts)

    def train_question(self, position: int) -> Question:
        return _question(1, position)

    def eval_questions(self) -> list[Question]:
        return [_question(0, number) for number in range(self.num_held_out)]

    def verify(self, question: Question, response: str) -> float:
        return float(response.strip() == question.answer)


def _question(a: int, b: int) -> Question:
    text = f"{a} + {b} ="
    return Question(messages=({"role": "user", "content": text},), answer=str(a + b), source="additions")
