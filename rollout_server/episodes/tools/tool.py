"""Makes tools from typed Python functions, classes and MCP servers, and calls them. The model reads their errors."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import ValidationError, validate_call
from transformers.utils import get_json_schema

from async_rl.base.errors import ConfigError
from async_rl.base.seams import import_object
from rollout_server.episodes.conversation.chat_messages import Message, Schema, ToolCall
from rollout_server.episodes.user_code import CodeExitError, ForeignCode, OverdueError, called, error_text

MAX_RESULT_CHARACTERS = 10_000
"""The longest result of a tool. The middle of a longer result is cut out."""
MAX_CALLS = 16
"""The most calls of one reply that are run. All episodes of a worker share a limit on simultaneous calls, so
hundreds of calls in one reply would delay the others."""
_KEY = "task.tools"


@dataclass(frozen=True, slots=True, eq=False)
class Tool:
    """A tool that the model may call."""

    schema: Schema
    function: Callable[..., Any] | None = None
    """A `def` or an `async def`. None: replies that call this tool go to the environment's `step`."""

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Tool:
        """Return a tool that calls a typed function. A `def` runs in a thread and may block.

        The tool's description comes from the annotations and the docstring, which needs a section `Args:`. When the
        model calls the tool, the call's arguments are checked against the annotations.

        Raises:
            ConfigError: an annotation, the docstring or the description of an argument is missing.
        """
        name = getattr(function, "__qualname__", repr(function))
        try:
            schema = get_json_schema(function)
        except Exception as error:  # transformers raises errors of several classes
            raise ConfigError(
                f"the tool {name} can't be described to the model: {error}. A tool is a function with an annotation "
                "for each argument and a docstring with a section `Args:` that has a line for each"
            ) from error
        schema["function"].pop("return", None)  # not in OpenAI's format, and it would cost tokens of every prompt
        return cls(schema, function)

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def load_tools(names: Sequence[str]) -> list[Callable[[], list[Tool]]]:
    """Return, for each entry of task.tools, a function that creates the entry's tools for one episode.

    An entry is one of these:

        module:function    one tool
        module:Class       created without arguments for each episode; its public methods are tools that share its state
        mcp:...            the address or command of an MCP server, which lists its tools; all episodes share its state

    Raises:
        ConfigError: an entry can't be imported, its object can't be created or described to the model, an MCP server
            can't be used, or two tools have the same name.
    """
    makers = [_maker(name) for name in names]
    counts = Counter(tool.name for name, make in zip(names, makers, strict=True) for tool in _first_made(name, make))
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ConfigError(f"{_KEY} must be tools of different names, got {', '.join(twice)} more than once")
    return makers


def _maker(name: str) -> Callable[[], list[Tool]]:
    if name.startswith("mcp:"):
        from rollout_server.episodes.tools.mcp_server import McpServer

        return partial(list, [Tool(schema, call) for schema, call in McpServer(name).tools()])
    found = import_object(name, _KEY)
    if isinstance(found, type):
        return partial(_tools_of_class, found)
    if callable(found):
        return partial(list, [Tool.from_function(found)])
    raise ConfigError(f"{_KEY} {name!r} must be a function or a class, got {type(found).__name__}")


def _first_made(name: str, make: Callable[[], list[Tool]]) -> list[Tool]:
    """Create and return the tools of an entry. Raises ConfigError if they can't be created or described to the model.
    """
    try:
        return make()
    except ConfigError:
        raise
    except Exception as error:  # creating them runs the user's code
        raise ConfigError(
            f"{_KEY} {name!r} can't be created: {type(error).__name__}: {error}. A class of tools is created for each "
            "episode, without arguments"
        ) from error


def _tools_of_class(found: type) -> list[Tool]:
    state = found()
    methods = [name for name, _ in inspect.getmembers(found, inspect.isfunction) if not name.startswith("_")]
    return [Tool.from_function(getattr(state, name)) for name in methods]


@dataclass(slots=True)
class ToolCounts:
    """Counts of the tool calls of one episode."""

    calls: int = 0
    """Calls in the model's replies, whether the run, the environment or the agent runs the tool."""
    failed: int = 0
    """Calls that failed because of the tool, its arguments, its name or the format."""
    timeouts: int = 0
    tool_s: float = 0.0
    """The summed time of all calls."""


@dataclass(slots=True)
class ToolCaller:
    """Calls the tools of one episode. Errors are counted, and become messages that the model reads.

    Args:
        places: a semaphore that limits the simultaneous calls of all episodes of a worker.
    """

    tools: Sequence[Tool]
    tool_s: float
    """The time limit of a call (timeouts.tool_s), from when `places` lets it start."""
    places: asyncio.Semaphore
    foreign: ForeignCode
    counts: ToolCounts = field(default_factory=ToolCounts)

    def schemas(self) -> list[Schema]:
        return [tool.schema for tool in self.tools]

    def can_answer(self, calls: Sequence[ToolCall]) -> bool:
        """Return whether all called tools have functions. If not, the environment must answer the reply."""
        own = {tool.name for tool in self.tools if tool.function is None}
        return not any(call["function"]["name"] in own for call in calls)

    async def answer(self, calls: Sequence[ToolCall], errors: Sequence[str]) -> list[Message]:
        """Run all calls of a reply simultaneously.

        Return their results in order, then a message for each malformed call.

        Calls beyond MAX_CALLS are not run; one more message says so.

        Args:
            errors: descriptions of the malformed calls.
        """
        run, told = calls[:MAX_CALLS], list(errors[: max(0, MAX_CALLS - len(calls))])
        if num_left := len(calls) + len(errors) - len(run) - len(told):
            told.append(f"a reply may hold at most {MAX_CALLS} calls, the last {num_left} of this one were not run")
        answers = await asyncio.gather(*map(self._answer, run))
        num_failed = len(calls) - len(run) + len(errors)
        self.counts.calls += num_failed
        self.counts.failed += num_failed
        return [*answers, *map(_malformed, told)]

    async def _answer(self, call: ToolCall) -> Message:
        name = call["function"]["name"]
        try:
            text = _shortened(await self._run(name, call["function"]["arguments"]))
        except ValidationError as error:
            text = _shortened("error: " + "; ".join(_argument_errors(error)))
            self.counts.failed += 1
        except OverdueError as error:
            text = f"error: {error}"
            self.counts.timeouts += 1
            self.counts.failed += 1
        except Exception as error:
            raised = error.__cause__ if isinstance(error, CodeExitError) else error
            text = _shortened(f"error: {type(raised).__name__}: {error_text(raised)}")
            self.counts.failed += 1
        return Message(role="tool", content=text, tool_call_id=call["id"], name=name)

    async def _run(self, name: str, arguments: str) -> str:
        self.counts.calls += 1
        function = next((tool.function for tool in self.tools if tool.name == name), None)
        if function is None:
            raise LookupError(f"there is no tool {name!r}, only {', '.join(tool.name for tool in self.tools)}")
        parsed = json.loads(arguments)
        if not isinstance(parsed, dict):
            raise TypeError(f"the arguments must be a JSON object, got {arguments:.200}")
        async with self.places:
            began_s = asyncio.get_running_loop().time()
            try:
                return await self.foreign.call(partial(_result, function, parsed), self.tool_s, f"the tool {name}")
            finally:
                self.counts.tool_s += asyncio.get_running_loop().time() - began_s


async def _result(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    result = await called(validate_call(function), **arguments)
    return result if isinstance(result, str) else json.dumps(result, default=str)


def _malformed(error: str) -> Message:
    """Return a message that describes a malformed call to the model.

    It has a name and an id of nine letters and digits, because some chat templates refuse results without them.
    """
    return Message(role="tool", content=_shortened(f"error: {error}"), tool_call_id="malformed", name="unknown")


def _shortened(text: str) -> str:
    half = MAX_RESULT_CHARACTERS // 2
    return (
        text if len(text) <= 2 * half else f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    )


def _argument_errors(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        place = ".".join(map(str, problem["loc"]))
        yield f"{place}: {problem['msg']}" if place else problem["msg"]
