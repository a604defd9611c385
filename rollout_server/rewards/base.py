"""The reward of a run: `task.reward` names a rule in `RULES`, or a function of the user's as `module:name`.

A function of the user's is called as `function(question, response)`, with the `Question` and the text of the response
without special tokens. It returns a number, may block, and must not be `async def`.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.seams import find_entry, import_object
from rollout_server.question import Question
from rollout_server.rewards.math_checker import num_children
from rollout_server.rewards.reward_threads import MAX_THREADS
from rollout_server.rewards.rules import RULES, Reward

_KEY = "task.reward"
_ARGUMENTS = ("question", "response")


class Verifier(Protocol):
    """The method of a task that `open_reward` needs, which scores a response if task.reward is empty."""

    def verify(self, question: Question, response: str) -> float:
        """Return the task's own reward of a response. Many threads call it at once, only if task.reward is empty."""


def open_reward(config: Config, task: Verifier) -> Reward:
    """Return the function that `task.reward` names; the task's `verify` if it is empty.

    Raises:
        ConfigError: there is no such rule or function, or the function is `async def` or takes other arguments.
    """
    name = config.task.reward
    if not name:
        return task.verify
    return _load_function(name) if ":" in name else find_entry(RULES, name, _KEY)


def num_threads(config: Config) -> int:
    """Return the number of reward threads, that is how many answers a worker scores at once.

    A function of the user's may wait for other machines, so it gets many threads. Rules get one thread per math-verify
    process, because a thread's wait for a free process would count against timeouts.reward_s.
    """
    return MAX_THREADS if ":" in config.task.reward else num_children()


def _load_function(name: str) -> Reward:
    function: Any = import_object(name, _KEY)
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
        return function
    try:
        signature.bind(*_ARGUMENTS)
    except TypeError as error:
        attribute = name.partition(":")[2]
        raise ConfigError(
            f"{_KEY} {name!r} must be a `def {attribute}(question, response)`, got {attribute}{signature}: {error}. "
            "The question has messages, answer (the right answer), extra and source"
        ) from None
    return function
