"""Where prompts come from. A prompt's index alone determines it, in every process and in every run with the
seed.

Kinds of task: `reasoning_gym_task` (generated, scored by its own verifier), `verl_files` (Parquet or JSONL).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.types import IntArray, Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One item of a task. It travels as `Prompt.reference` to the reward function."""

    messages: tuple[dict[str, str], ...]
    """Chat messages with the keys `role` and `content`."""
    answer: Any
    """The reference answer (`ground_truth` of a file's row)."""
    solution: str = ""
    """A worked answer for supervised fine-tuning; empty: `answer`."""
    extra: dict[str, Any] = field(default_factory=dict)
    """`extra_info` of a file's row, `metadata` of a reasoning_gym item."""
    source: str = ""


class Task(ABC):
    """Training prompts by index, a disjoint held-out set, and a verifier. Safe to call from any thread."""

    num_prompts: int
    """Training prompts of one epoch."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config = config.task
        self._seed = config.run.seed
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._order = lru_cache(maxsize=4)(self._shuffled)
        self.skipped_long = 0
        """Prompts left out so far because they have more than task.max_prompt_tokens tokens."""

    @abstractmethod
    def train_question(self, position: int) -> Question:
        """Question number `position` of 0..num_prompts - 1, short enough."""

    @abstractmethod
    def eval_questions(self, size: int) -> list[Question]:
        """At most `size` held-out questions, short enough, the same whatever run.seed is."""

    @abstractmethod
    def verify(self, question: Question, response: str) -> float:
        """The task's own reward of a response."""

    def prompt(self, index: int) -> Prompt:
        """Training prompt `index` of 0, 1, ...: every epoch holds each question once, in an order of its own.
        """
        epoch, place = divmod(index, self.num_prompts)
        with self._lock:
            return self._encode(self.train_question(int(self._order(epoch)[place])), index)

    def eval_prompts(self, size: int) -> list[Prompt]:
        with self._lock:
            return [self._encode(question, i) for i, question in enumerate(self.eval_questions(size))]

    def sft_pairs(self, n: int) -> list[tuple[list[int], list[int]]]:
        """(prompt tokens, answer tokens with the final eos) of the first `n` training prompts."""
        eos = self._tokenizer.eos_token_id
        if eos is None:
            raise ConfigError("supervised fine-tuning needs a tokenizer with an eos token, this one has none")
        pairs = []
        for index in range(n):
            prompt = self.prompt(index)
            question: Question = prompt.reference
            answer = question.solution or question.answer
            if not isinstance(answer, str):
                raise ConfigError(
                    f"{question.source} has no reference answer to learn from (got {answer!r}): it can't "
                    "warm-start a model. Use another task for sft."
                )
            tokens = self._tokenizer(answer, add_special_tokens=False)["input_ids"]
            pairs.append((prompt.tokens.tolist(), [*tokens, eos]))
        return pairs

    def text_of(self, question: Question) -> str:
        """The chat template applied, where the tokenizer has one; else the messages' contents, a line each.

        Raises:
            ConfigError: the template refuses the messages.
        """
        if self._tokenizer.chat_template:
            messages = list(question.messages)
            template = self._tokenizer.apply_chat_template
            try:
                return str(template(messages, tokenize=False, add_generation_prompt=True))
            except Exception as error:  # a template is code, which may raise what it wants
                roles = ", ".join(message["role"] for message in messages)
                raise ConfigError(
                    f"the chat template of the model's tokenizer can't be applied to a prompt of {question.source} "
                    f"with the roles {roles}: {type(error).__name__}: {error}. Change the prompts, or the model's "
                    "chat_template.jinja (chat_template in tokenizer_config.json)"
                ) from error
        return "\n".join(message["content"] for message in question.messages)

    def tokens_of(self, text: str) -> IntArray:
        # A chat template writes the special tokens itself.
        special = not self._tokenizer.chat_template
        return np.asarray(self._tokenizer(text, add_special_tokens=special)["input_ids"], dtype=np.int32)

    def is_short_enough(self, question: Question) -> bool:
        """False counts it as skipped. Raises ConfigError instead when task.long_prompts is `refuse`."""
        length = len(self.tokens_of(self.text_of(question)))
        if length <= self._config.max_prompt_tokens:
            return True
        if self._config.long_prompts == "refuse":
            raise ConfigError(
                f"a prompt of {question.source} has {length} tokens, task.max_prompt_tokens allows "
                f"{self._config.max_prompt_tokens}. Raise it, or set task.long_prompts: skip. The prompt "
                f"begins: {self.text_of(question)[:80]!r}"
            )
        self.skipped_long += 1
        return False

    def _encode(self, question: Question, index: int) -> Prompt:
        text = self.text_of(question)
        return Prompt(
            index=index, tokens=self.tokens_of(text), text=text, reference=question, source=question.source
        )

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_prompts)


def open_task(config: Config, tokenizer: Any) -> Task:
    """The task that `task.name` or `task.path` names. Raises ConfigError when it can't be used."""
    if config.task.path:
        from rollout_server.tasks.verl_files import VerlFilesTask

        return VerlFilesTask(config, tokenizer)
    from rollout_server.tasks.reasoning_gym_task import ReasoningGymTask

    return ReasoningGymTask(config, tokenizer)
