"""The interface of environments, which give the model observations and reward its replies. `task.env` names one.

An environment is made for one episode. Its methods are awaited one after the other, each with a time limit. They share
the event loop with all other episodes, so they must not block it. The tasks that they create end with the episode; one
that serves several episodes needs a context of its own: asyncio.create_task(..., context=contextvars.Context()).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout_server.episodes.conversation.messages import Message
from rollout_server.episodes.tools.tool import Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The answer of an environment to a reply of the model: what the model sees next, the reward, and the end."""

    messages: Sequence[Message] = ()
    """The messages that the model sees next, at least one unless the episode is done."""
    reward: float = 0.0
    """The reward of this turn. The reward of the episode is the sum over its turns."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log, of at most 64 names in one episode. The last value of each name counts for the episode."""


class Env(Protocol):
    """The methods that a class for `task.env` must have. An object of it plays one episode."""

    @property
    def tools(self) -> Sequence[Tool | Callable[..., Any]]:
        """The tools that the model may call, known before `start`; an attribute of the class will do.

        A function is a tool as in `task.tools`. The episode calls the tools and shows the model the results; only
        replies that call no tool, or a Tool without a function, are given to `step`.
        """

    async def start(self) -> Sequence[Message]:
        """Return the messages that the model sees first, at least one."""

    async def step(self, reply: Message) -> Step:
        """Return the answer to a reply of the model, a message with `content` and, if it calls tools, `tool_calls`."""

    async def close(self) -> None:
        """Release what the episode holds. It is called once, also after an error, a timeout or a cancelled call."""
