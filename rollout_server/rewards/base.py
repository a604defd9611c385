"""The reward of a run: `task.reward` names a rule of `RULES` or a function of the user's as `module:name`.

A function of the user's is called as `function(prompt, response, answer, extra)`: the text of the prompt with the chat
template applied, the text of the response without special tokens, the reference answer, and `extra_info` of the row
with its `data_source`. It returns a number, may block, and must be `def`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Protocol

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.seams import find_entry, import_object
from async_rl.types import Prompt
from rollout_server.question import Question
from rollout_server.rewards.math_checker import num_children
from rollout_server.rewards.reward_threads import MAX_THREADS
from rollout_server.rewards.rules import RULES

Reward = Callable[[Prompt, str], float]
"""(prompt, response text without special tokens) -> reward. It is called in threads; an exception fails the group."""
_KEY = "task.reward"


class Verifier(Protocol):
    """The part of a task that rewards use."""

    def verify(self, question: Question, response: str) -> float:
        """Return the task's own reward of a response."""


def open_reward(config: Config, task: Verifier) -> Reward:
    """Return the reward that `task.reward` names; empty: the task's own verifier.

    Raises:
        ConfigError: there is no such rule or function, or the function is `async def`.
    """
    name = config.task.reward
    if not name:
        return lambda prompt, response: task.verify(prompt.reference, response)
    if ":" not in name:
        rule = find_entry(RULES, name, _KEY)
        return lambda prompt, response: rule(response, prompt.reference.answer)
    return partial(_call_custom, _load_function(name))


def num_threads(config: Config) -> int:
    """Return how many answers are scored at once.

    A function of the user's may wait for other machines. A rule computes, and may need a math-verify process, which
    its thread must find free: the wait for one would count as scoring.
    """
    return MAX_THREADS if ":" in config.task.reward else num_children()


def _call_custom(function: Callable[..., float], prompt: Prompt, response: str) -> float:
    question: Question = prompt.reference
    extra = {**question.extra, "data_source": question.source}
    return function(prompt.text, response, question.answer, extra)


def _load_function(name: str) -> Callable[..., float]:
    function = import_object(name, _KEY)
    if not callable(function):
        raise ConfigError(f"{_KEY} {name!r} is not a function but {type(function).__name__}")
    if any(map(inspect.iscoroutinefunction, (function, function.__call__))):
        raise ConfigError(
            f"{_KEY} {name!r} must be a `def`, got an `async def`. It runs in a thread of its own and may block there"
        )
    return function  # type: ignore[no-any-return]
