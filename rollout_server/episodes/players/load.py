"""Loads the environment and the agent that the configuration names as `module:name`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.seams import import_object
from async_rl.base.types import Prompt
from rollout_server.episodes.agents.agent_runner import Agent
from rollout_server.episodes.env import Env
from rollout_server.question import Question

ENV_KEY, AGENT_KEY = "task.env", "task.agent"
_GIVEN = ("question", "index", "seed")
"""The arguments that an environment's constructor may name. All others are in `task.params`."""
_METHODS = ("start", "step", "close")

MakeEnv = Callable[[Question | None, int, int], Env]
"""Takes (question, index, seed) and returns a fresh environment.

The question is the task's, None if the run has only an environment. All episodes of a group have the same
question and index. Each has another seed. Held-out episodes have the indices -1, -2, ...
"""


def load_env(name: str, params: Mapping[str, Any] | None, has_questions: bool) -> MakeEnv:
    """Return the function that makes environments of the class `name`.

    Args:
        params: task.params, the other arguments of the class. None: with task.name they belong to the task, and the
            class gets none.
        has_questions: whether the run has a task that the environment may ask the questions of.

    Raises:
        ConfigError: the class can't be imported, is no environment, or can't be called with these arguments.
    """
    found = import_object(name, ENV_KEY)
    if missing := [m for m in _METHODS if not inspect.iscoroutinefunction(getattr(found, m, None))]:
        raise ConfigError(
            f"{ENV_KEY} {name!r} must be a class with the `async def` methods {', '.join(_METHODS)}, "
            f"{', '.join(missing)} is not one: see rollout_server/episodes/env.py"
        )
    parameters, arguments = inspect.signature(found).parameters, params or {}
    given = [argument for argument in _GIVEN if argument in parameters and argument not in arguments]
    if "question" in given and not has_questions and parameters["question"].default is inspect.Parameter.empty:
        raise ConfigError(f"{ENV_KEY} {name!r} needs questions: set task.name or task.path")
    try:
        inspect.signature(found).bind(**dict.fromkeys(given), **arguments)
    except TypeError as error:
        others = (
            "need defaults: with task.name, task.params are those of the task" if params is None else
            f"come from task.params, got {dict(params)}"
        )  # fmt: skip
        raise ConfigError(
            f"{ENV_KEY} {name!r} can't be created: {error}. Its arguments are {', '.join(parameters) or 'none'}; "
            f"{', '.join(_GIVEN)} are given, the others {others}"
        ) from None

    def make(question: Question | None, index: int, seed: int) -> Env:
        values = {"question": question, "index": index, "seed": seed}
        env: Env = found(**{argument: values[argument] for argument in given}, **arguments)
        return env

    return make


def load_task_env(config: Config) -> Callable[[Prompt, int], Env]:
    """Return the function that makes an environment of `task.env` for (a prompt of the run's task, a seed).

    Raises:
        ConfigError: the class can't be imported, is no environment, or can't be called with task.params.
    """
    task = config.task
    has_questions = bool(task.name or task.path)
    make = load_env(task.env, None if task.name else task.params, has_questions)

    def open_env(prompt: Prompt, seed: int) -> Env:
        question = prompt.question
        if not has_questions:
            return make(None, question.ground_truth, seed)
        return make(question, -1 - prompt.index if prompt.is_held_out else prompt.index, seed)

    return open_env


def load_agent(name: str) -> Agent:
    """Return the agent that `task.agent` names as `module:name`.

    Raises:
        ConfigError: `name` can't be imported, or can't be called as agent(question, base_url=..., api_key=...).
    """
    found = import_object(name, AGENT_KEY)
    try:
        inspect.signature(found).bind(None, base_url="", api_key="")
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{AGENT_KEY} {name!r} must be a function (question, base_url, api_key) that returns a reward: {error}"
        ) from None
    agent: Agent = found
    return agent
