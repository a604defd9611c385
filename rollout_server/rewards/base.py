"""The reward of a run: `task.reward` names a rule in `RULES`, or a function of the user's as `module:name`.

A function of the user's is called as `function(prompt, response, answer, extra)`: the text of the prompt with the chat
template applied, the text of the response without special tokens, the reference answer, and the row's `extra_info`
with its `data_source`. The function returns a number, may block, and must not be `async def`.
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
"""Takes (prompt, response text without special tokens), returns the reward. Called in threads; if it raises, the
group fails."""
_KEY = "task.reward"
_ARGUMENTS = ("prompt", "response", "answer", "extra")


class Verifier(Protocol):
    """The method of a task that `open_reward` needs, which scores a response if task.reward is empty."""

    def verify(self, question: Question, response: str) -> float:
        """Return the task's own reward of a response. Many threads call it at once, only if task.reward is empty."""


def open_reward(config: Config, task: Verifier) -> Reward:
    """Return the function (prompt, response) -> reward that `task.reward` names; the task's `verify` if it is empty.

    Raises:
        ConfigError: there is no such rule or function, or the function is `async def` or takes other arguments.
    """
    name = config.task.reward
    if not name:
        return lambda prompt, response: task.verify(prompt.reference, response)
    if ":" not in name:
        rule = find_entry(RULES, name, _KEY)
        return lambda prompt, response: rule(response, prompt.reference.answer)
    return partial(_call_custom, _load_function(name))


def num_threads(config: Config) -> int:
    """Return the number of reward threads, that is how many answers a worker scores at once.

    A function of the user's may wait for other machines, so it gets many threads. Rules get one thread per math-verify
    process, because a thread's wait for a free process would count against timeouts.reward_s.
    """
    return MAX_THREADS if ":" in config.task.reward else num_children()


def _call_custom(function: Callable[..., float], prompt: Prompt, response: str) -> float:
    question: Question = prompt.reference
    extra = {**question.extra, "data_source": question.source}
    return function(prompt.text, response, question.answer, extra)


def _load_function(name: str) -> Callable[..., float]:
    function = import_object(name, _KEY)
    if not callable(function) or inspect.isclass(function):
        kind = "a class" if inspect.isclass(function) else type(function).__name__
        raise ConfigError(f"{_KEY} {name!r} is not a function but {kind}")
    if any(map(inspect.iscoroutinefunction, (function, function.__call__))):
        raise ConfigError(
            f"{_KEY} {name!r} must be a `def`, got an `async def`. It runs in a thread of its own and may block there"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C may have none
        return function  # type: ignore[no-any-return]
    try:
        signature.bind(*_ARGUMENTS)
    except TypeError as error:
        raise ConfigError(
            f"{_KEY} {name!r} must take the four arguments {', '.join(_ARGUMENTS)}, got "
            f"{name.partition(':')[2]}{signature}: {error}"
        ) from None
    return function  # type: ignore[no-any-return]
