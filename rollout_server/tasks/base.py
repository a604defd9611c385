"""Tasks, the source of prompts: their base class, and the table of built-in tasks.

A prompt depends only on its index and the seed: all processes, and all runs with the same seed, get the same prompt.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_folder import TEMPLATE_DATE
from async_rl.base.seams import import_object
from async_rl.base.seams.lookup import check_extra
from async_rl.base.types import IntArray, Prompt
from buffer.prompt_order import MAX_PROMPTS, PromptOrder
from rollout_server.question import Question


class Task(ABC):
    """The base class of tasks. A task has training prompts by index, a disjoint held-out set, and a verifier.

    `task.name: my_module:MyTask` names your own subclass. It must set `num_prompts`, and gets its settings
    (task.params) in `params`. `train_question` and `eval_questions` run in one thread at a time, `verify` in many.
    """

    num_prompts: int
    """The number of training prompts in one epoch, 1 to MAX_PROMPTS."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self._config = config.task
        self._seed = config.run.seed
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        """Protects `train_question` and `eval_questions`, but not the tokenizing."""
        self.eval_size = config.eval.num_prompts
        """The wanted number of held-out questions (eval.num_prompts)."""
        self.params = config.task.params
        """The task's own settings (task.params)."""
        self._eval_prompts: list[Prompt] | None = None
        self.cautions: list[str] = []
        """Warnings about settings and data that work but may not be meant. The run prints them."""
        self.skipped_long = 0
        """The number of prompts left out so far, because they have more than task.max_prompt_tokens tokens."""
        self.shortest_long_tokens = 0
        """The tokens of the shortest prompt that was left out as too long; 0 if none was."""

    @abstractmethod
    def train_question(self, position: int) -> Question:
        """Return question number `position`, 0..num_prompts - 1.

        Its prompt must have at most task.max_prompt_tokens tokens.
        """

    @abstractmethod
    def eval_questions(self) -> list[Question]:
        """Return at most eval.num_prompts held-out questions, the same for every run.seed.

        Each prompt must have at most task.max_prompt_tokens tokens.
        """

    @abstractmethod
    def verify(self, question: Question, response: str) -> float:
        """Return the task's own reward of a response, used if the configuration names no reward.

        It must be thread-safe.
        """

    def rules_of(self, question: Question) -> tuple[str, ...]:
        """Return the names of the rewards that score answers to the question; "" stands for `verify`."""
        return tuple(each.reward for each in self._config.named_rewards)

    def has_answer(self, prompt: Prompt, response: str) -> bool | None:
        """Return whether the reward finds an answer, right or wrong, in the response; None if that is not known."""
        from rollout_server.rewards.rules import NUMBER_RULES, find_number

        numbers = [rule for rule in self.rules_of(prompt.question) if rule in NUMBER_RULES]
        return any(find_number(rule, response) for rule in numbers) if numbers else None

    def prompt(self, index: int) -> Prompt:
        """Return the training prompt with this index, which counts from 0 over all epochs.

        Each epoch of `num_prompts` indices has every question once, in another order unless task.shuffle is false.
        """
        with self._lock:
            position = self.order.position(index)
            question = self.train_question(position)
        return self.encode(question, index, *self._place(position, is_held_out=False))

    @cached_property
    def order(self) -> PromptOrder:
        """The order of the training prompts."""
        return PromptOrder(self._sources(), self._seed, shuffles=self._config.shuffle)

    def eval_prompts(self) -> list[Prompt]:
        """Return the held-out prompts. The first call tokenizes them."""
        if self._eval_prompts is None:
            with self._lock:
                questions = self.eval_questions()
            self._eval_prompts = [
                replace(self.encode(question, i, *self._place(i, is_held_out=True)), is_held_out=True)
                for i, question in enumerate(questions)
            ]
        return self._eval_prompts

    def sft_pairs(self, n: int) -> list[tuple[Prompt, list[int]]]:
        """Return (prompt, answer tokens) for each of the first `n` training prompts, for supervised fine-tuning.

        The answer is the worked solution or, if there is none, the right answer. It ends with the eos token.
        """
        pairs = []
        for index in range(n):
            prompt = self.prompt(index)
            question: Question = prompt.question
            answer = question.solution or question.ground_truth
            if not isinstance(answer, str):
                raise ConfigError(
                    f"a question of {question.source} has no right answer that is text (got {answer!r}), so sft "
                    "can't learn from it. Use another task for sft."
                )
            pairs.append((prompt, answer_tokens(self._tokenizer, answer)))
        return pairs

    def is_short_enough(self, question: Question) -> bool:
        """Return whether the prompt has at most task.max_prompt_tokens tokens. If not, count it in `skipped_long`."""
        length = len(self._tokens(self._text(self._asked(question))))
        if length <= self._config.max_prompt_tokens:
            return True
        self.skipped_long += 1
        self.shortest_long_tokens = min(length, self.shortest_long_tokens or length)
        return False

    def _asked(self, question: Question) -> Question:
        return question.with_system_prompt(self._config.system_prompt)

    def _text(self, question: Question) -> str:
        return prompt_text(
            self._tokenizer, question.messages, question.source, self._config.chat_template_kwargs
        )

    def _tokens(self, text: str) -> IntArray:
        return np.asarray(prompt_tokens(self._tokenizer, text), dtype=np.int32)

    def _place(self, position: int, *, is_held_out: bool) -> tuple[int, str]:
        """Return where question number `position` comes from: (its `data_row`, a description for messages)."""
        return position, f"{'held-out ' if is_held_out else ''}question {position} of {self._config.name}"

    def encode(self, question: Question, index: int, data_row: int, origin: str) -> Prompt:
        """Return the prompt of a question, with the task's system prompt.

        Args:
            index: the index of the prompt.
            data_row: the number of the question in its source.
            origin: a description of that place, for messages.
        """
        question = self._asked(question)
        text = self._text(question)
        return Prompt(
            index=index, tokens=self._tokens(text), text=text, messages=question.messages, question=question,
            source=question.source, data_row=data_row, origin=origin,
        )

    def _sources(self) -> list[tuple[int, int]]:
        """Return for each source of training questions: (number of questions, how many of them an epoch has)."""
        return [(self.num_prompts, self.num_prompts)]


def prompt_text(
    tokenizer: Any, messages: Sequence[dict[str, str]], source: str, settings: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Render messages with the chat template, ready for a reply. Without a template: their contents, one per line.

    Args:
        source: where the messages come from, for error messages.
        settings: further arguments of the chat template (task.chat_template_kwargs).

    Raises:
        ConfigError: the chat template refuses the messages.
    """
    if not tokenizer.chat_template:
        return "\n".join(message["content"] for message in messages)
    try:
        return str(
            tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, strftime_now=TEMPLATE_DATE.strftime,
                **settings,
            )
        )  # fmt: skip
    except Exception as error:  # a template is code, which may raise anything
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"the chat template of the model's tokenizer can't be applied to a prompt of {source} "
            f"with the roles {roles}: {type(error).__name__}: {error}. Change the prompts, or the model's "
            "chat_template.jinja (chat_template in tokenizer_config.json)"
        ) from error


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text from `prompt_text`. Special tokens are added only if there is no chat template."""
    tokens: list[int] = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"]
    return tokens


def chat_messages(value: Any, role: str) -> list[dict[str, str]] | None:
    """Return `value` as chat messages with only role and content: a text becomes one message with the role `role`.

    Returns None if `value` is neither a text nor a list of messages, or if the list is empty.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    keys = ("role", "content")
    if not isinstance(value, list) or not all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in keys) for message in value
    ):
        return None
    return [{key: message[key] for key in keys} for message in value] or None


def answer_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of an answer, followed by the eos token."""
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


TASKS = {
    "reasoning_gym": "rollout_server.tasks.reasoning_gym_task:ReasoningGymTask",
    "files": "rollout_server.tasks.files_task:FilesTask",
    "": "rollout_server.tasks.env_task:EnvTask",
}
"""The class of each kind of task. The kinds are `task.name: reasoning_gym/<dataset>`, `task.path: <file>`, or neither.
"""
_EXTRAS = {"reasoning_gym": "reasoning-gym"}
"""For kinds of task that need one: the extra of this package to install."""


def open_task(config: Config, tokenizer: Any) -> Task:
    """Create the run's task: of the class in `task.name` if that is `module:name`, else of a class in `TASKS`."""
    name = config.task.name
    kind = "files" if config.task.path else name.partition("/")[0]
    if kind in _EXTRAS:
        check_extra(_EXTRAS[kind], f"task.name {name!r}")
    place = name if ":" in name else TASKS[kind]
    found = import_object(place, "task.name")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"task.name {name!r} must be a subclass of {Task.__module__}.Task, got {found!r}")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"task.name {name!r} must define {', '.join(missing)}: see {Task.__module__}.Task")
    task = found(config, tokenizer)
    number = getattr(task, "num_prompts", 0)
    if number < 1:
        raise ConfigError(f"task.name {name!r} must set num_prompts, at least 1, in __init__")
    if number > MAX_PROMPTS:
        raise ConfigError(
            f"an epoch must have at most {MAX_PROMPTS} prompts, got {number}: each worker keeps their order, 8 bytes a "
            f"prompt. Lower {'the weights in task.path' if config.task.path else f'num_prompts of {name}'}"
        )
    return task
