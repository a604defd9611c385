"""A task from outside the packages: sums of two numbers."""

from __future__ import annotations

from rollout_server.question import Question
from rollout_server.tasks.base import Task


class Additions(Task):
    """Sums of two numbers. The held-out sums begin with 0, the training sums with 1."""

    num_prompts = 31

    def train_question(self, position: int, first: int = 1) -> Question:
        messages = ({"role": "user", "content": f"{first} + {position} ="},)
        return Question(messages=messages, ground_truth=str(first + position), source="additions")

    def eval_questions(self) -> list[Question]:
        return [self.train_question(number, first=0) for number in range(self.eval_size)]

    def verify(self, question: Question, response: str) -> float:
        return float(response.strip() == question.ground_truth)
