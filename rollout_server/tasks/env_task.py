"""The task of a run that has only an environment, without questions."""

from __future__ import annotations

from typing import Any

import numpy as np

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.types import Prompt
from rollout_server.question import Question
from rollout_server.tasks.base import Task


class EnvTask(Task):
    """A task whose prompts are only numbers of episodes.

    The task.size training episodes are 0, 1, ..., the eval.num_prompts held-out ones -1, -2, ... A prompt has no
    tokens, because only the environment knows what the model sees first. The question's `ground_truth` is the number.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        super().__init__(config, tokenizer)
        self.num_prompts = config.task.size

    def train_question(self, position: int) -> Question:
        return self._question(position)

    def eval_questions(self) -> list[Question]:
        return [self._question(-1 - number) for number in range(self.eval_size)]

    def verify(self, question: Question, response: str) -> float:
        """Raise NotImplementedError. It is never called, because the environment gives the rewards."""
        raise NotImplementedError("no rule scores this run's episodes: the environment gives the rewards")

    def sft_pairs(self, n: int) -> list[tuple[Prompt, list[int]]]:
        raise ConfigError(
            f"the environment {self._config.env} has no right answers, so sft can't learn from it. "
            "Set sft.oracle to the package.module:function that writes the replies to learn"
        )

    def _question(self, number: int) -> Question:
        return Question(messages=(), ground_truth=number, source=self._config.env)

    def _place(self, position: int, *, is_held_out: bool) -> tuple[int, str]:
        number = -1 - position if is_held_out else position
        return position, f"episode {number} of {self._config.env}"

    def encode(self, question: Question, index: int, data_row: int, origin: str) -> Prompt:
        return Prompt(
            index=index, tokens=np.zeros(0, np.int32), text=origin, question=question, source=question.source,
            data_row=data_row, origin=origin,
        )
