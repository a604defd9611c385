"""The interface of environments, which give the model observations and reward its replies. `task.env` names one.

An environment is made for one episode. Its methods are awaited one after the other, each with a time limit. They share
the event loop with all other episodes, so they must not block it. Tasks that they create end with the episode. A task
that serves several episodes needs a context of its own: asyncio.create_task(..., context=contextvars.Context()).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_rl.base.config import Config
from async_rl.base.errors import ConfigError
from async_rl.base.seams import import_object
from async_rl.base.types import Prompt
from rollout_server.episodes.conversation.chat_messages import Message
from rollout_server.episodes.tools.tool import Tool
from rollout_server.question import Question

_KEY = "task.env"
_GIVEN = ("question", "index", "seed")
"""The arguments that an environment's constructor may name. All others are in `task.params`."""
_METHODS = ("start", "step", "close")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An environment's response to a reply of the model: new messages, the reward, and whether the episode is done."""

    messages: Sequence[Message] = ()
    """The messages that the model sees next, at least one unless the episode is done."""
    reward: float = 0.0
    """The reward of this turn. The reward of the episode is the sum over its turns."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log, under at most 64 names in one episode. The last value of each name counts for the episode."""


class Env(Protocol):
    """The methods that a class for `task.env` must have. An instance plays one episode."""

    @property
    def tools(self) -> Sequence[Tool | Callable[..., Any]]:
        """The tools that the model may call. It is read before `start`; a class attribute is enough.

        A function becomes a tool as in `task.tools`. The episode calls the tools and shows the model the results.
        `step` gets only two kinds of replies: those without tool calls, and those that call a Tool without a function.
        """

    async def start(self) -> Sequence[Message]:
        """Return the messages that the model sees first, at least one."""

    async def step(self, reply: Message) -> Step:
        """Return the environment's response to a reply: a message with `content` and, if it calls tools, `tool_calls`.
        """

    async def close(self) -> None:
        """Release the episode's resources. Called once, also after an error, a timeout or a cancelled call."""


class QuestionEnv:
    """An environment for a question with tools. The episode is done with the first reply that calls no tool.

    The environment gives no reward. The run's reward function scores the answers of a whole group, see
    `Episode.answer`.
    """

    def __init__(self, question: Question, tools: Sequence[Tool]) -> None:
        self.tools = tools
        self._question = question

    async def start(self) -> list[Message]:
        return [Message(role=said["role"], content=said["content"]) for said in self._question.messages]

    async def step(self, reply: Message) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        pass


MakeEnv = Callable[[Question | None, int, int], Env]
"""A function from (question, index, seed) to a new environment.

The question is the task's, or None if the run has only an environment. All episodes of a group have the same question
and index, and different seeds. Held-out episodes have the indices -1, -2, ..."""


def load_env(name: str, params: Mapping[str, Any] | None, has_questions: bool) -> MakeEnv:
    """Import the environment class `name`, and return a function that creates its instances.

    Args:
        params: further arguments of the class (task.params). None: the class gets none, because with task.name they
            belong to the task.
        has_questions: whether the run has a task with questions.

    Raises:
        ConfigError: the class can't be imported, is no environment, or can't be called with these arguments.
    """
    found = import_object(name, _KEY)
    if missing := [m for m in _METHODS if not inspect.iscoroutinefunction(getattr(found, m, None))]:
        raise ConfigError(
            f"{_KEY} {name!r} must be a class with the `async def` methods {', '.join(_METHODS)}, "
            f"{', '.join(missing)} is not one: see rollout_server/episodes/env.py"
        )
    parameters, arguments = inspect.signature(found).parameters, params or {}
    given = [argument for argument in _GIVEN if argument in parameters and argument not in arguments]
    if "question" in given and not has_questions and parameters["question"].default is inspect.Parameter.empty:
        raise ConfigError(f"{_KEY} {name!r} needs questions: set task.name or task.path")
    try:
        inspect.signature(found).bind(**dict.fromkeys(given), **arguments)
    except TypeError as error:
        others = (
            "need defaults: with task.name, task.params are those of the task" if params is None else
            f"come from task.params, got {dict(params)}"
        )  # fmt: skip
        raise ConfigError(
            f"{_KEY} {name!r} can't be created: {error}. Its arguments are {', '.join(parameters) or 'none'}; "
            f"{', '.join(_GIVEN)} are given, the others {others}"
        ) from None

    def make(question: Question | None, index: int, seed: int) -> Env:
        values = {"question": question, "index": index, "seed": seed}
        env: Env = found(**{argument: values[argument] for argument in given}, **arguments)
        return env

    return make


def load_task_env(config: Config) -> Callable[[Prompt, int], Env]:
    """Return a function that creates an environment of class `task.env` from (a prompt of the run's task, a seed).

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
