"""What an agent asks for in any of the endpoint's APIs, and the checks that the APIs share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollout_server.episodes.conversation.chat_messages import Message, Schema, plain_messages
from rollout_server.episodes.conversation.session import Reply

IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (), "top_p": (), "top_k": (), "min_p": (), "frequency_penalty": (), "presence_penalty": (),
    "repetition_penalty": (), "seed": (), "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,), "reasoning_effort": (),
}  # fmt: skip
"""Parameters that are ignored: they would change how the policy samples, or need a constrained decoder, whose logprobs
belong to another distribution. Each has the values, besides null, that change nothing and cause no warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """An agent's request for the next message of a conversation: the body of a POST, checked."""

    messages: list[Message]
    tools: list[Schema]
    max_tokens: int | None
    stop: tuple[str, ...] = ()
    stream: bool
    stream_usage: bool = False
    """Only for chat completions: the stream ends with the usage."""
    model: str
    ignored: tuple[str, ...] = ()
    """The names of parameters in the request that have no effect."""


@dataclass(frozen=True, slots=True)
class Api:
    """One of the endpoint's APIs: how it reads requests, and writes replies and errors."""

    read: Callable[[Any], AgentRequest]
    """Checks a JSON body. Raises RequestRefusedError."""
    body: Callable[[AgentRequest, Reply], dict[str, Any]]
    """The response that is not streamed."""
    events: Callable[[AgentRequest, Reply], Iterator[bytes]]
    """The server-sent events of a streamed response."""
    error: Callable[[RequestRefusedError], dict[str, Any]]


class RequestRefusedError(Exception):
    """Refuses an agent's request. The response has HTTP status `status`, and JSON with `code` and the message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def sse(data: Any, event: str = "") -> bytes:
    """Return one server-sent event."""
    text = data if isinstance(data, str) else json.dumps(data)
    return (f"event: {event}\n" if event else "").encode() + f"data: {text}\n\n".encode()


def invalid(name: str, allowed: str, value: Any) -> RequestRefusedError:
    return RequestRefusedError(400, "invalid_request", f"{name} must be {allowed}, got {value!r:.200}")


def unsupported(names: Iterable[str], hint: str = "leave it out") -> RequestRefusedError:
    text = f"the policy can't be trained on a reply with {', '.join(names)}: {hint}"
    return RequestRefusedError(400, "unsupported", text)


def refuse_unknown(body: Mapping[str, Any], known: frozenset[str], values: Mapping[str, Any]) -> None:
    """Refuse a body with a parameter that is not in `known`, unless its value requests nothing.

    Args:
        values: for some parameters, the value besides null, false and empty ones that requests nothing.
    """
    nothing: tuple[Any, ...] = (None, False, 0, "", [], {})
    if names := [key for key in body if key not in known and body[key] not in (*nothing, values.get(key))]:
        raise unsupported(names)


def ignored_in(body: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> tuple[str, ...]:
    """Return the parameters of a body that `table` names, without those whose value changes nothing."""
    return tuple(key for key, honoured in table.items() if body.get(key) not in (None, *honoured))


def checked_messages(messages: list[Any]) -> list[Message]:
    """Return chat messages as the session takes them.

    Raises:
        RequestRefusedError: a message is malformed, or a tool's result has no call before it.
    """
    try:
        plain = plain_messages(messages)
    except ValueError as error:
        raise RequestRefusedError(400, "invalid_request", str(error)) from None
    has_called = False
    for position, message in enumerate(plain):
        has_called = has_called or "tool_calls" in message
        if message["role"] == "tool" and not has_called:
            raise RequestRefusedError(
                400, "invalid_request",
                f"messages[{position}] is the result of a tool, and no message before it has a call: keep the reply "
                "with the call before its result",
            )  # fmt: skip
    return plain


def checked_length(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the lowest value of the parameters `names` in a body, or None if none is set."""
    found = {name: body[name] for name in names if body.get(name) is not None}
    for name, value in found.items():
        if type(value) is not int or value < 1:
            raise invalid(name, "a whole number from 1", value)
    return min(found.values(), default=None)


def checked_list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise invalid(name, "a list", value)
    return value


def checked_stop(stop: Any, name: str) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else checked_list(stop or [], name)
    if not all(isinstance(text, str) and text for text in texts):
        raise invalid(name, "texts", stop)
    return tuple(texts)


def flat_tools(tools: Any, kinds: tuple[str | None, ...], parameters: str) -> list[Schema]:
    """Read tools whose name, description and parameters are not nested in `function`.

    Args:
        kinds: the values of `type` of tools that the agent runs itself.
        parameters: the key of the JSON schema.
    """
    found: list[Schema] = []
    for tool in checked_list(tools or [], "tools"):
        if not isinstance(tool, dict) or not isinstance(tool.get("name"), str):
            raise invalid("tools", "objects with a name", tool)
        if tool.get("type") not in kinds:
            raise unsupported([f"tools of the type {tool.get('type')!r:.50}"], "the agent runs its tools itself")
        found.append(tool_schema(tool, parameters))
    return found


def tool_schema(tool: Mapping[str, Any], parameters: str = "parameters") -> Schema:
    """Return the description of a tool as the chat template gets it: the same keys in the same order for every API.

    Args:
        parameters: the key of the JSON schema.
    """
    function = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get(parameters)}
    set_ones = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": set_ones}


def text_of(content: Any, place: str, kinds: Mapping[str, str]) -> str:
    """Return the text of a message's content, which is null, a text, or a list of text parts.

    Args:
        place: the name of the content in error messages.
        kinds: for each allowed type of a part, the key of its text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in checked_list(content, place):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(kinds[kind]) if isinstance(kind, str) and kind in kinds else None
        if not isinstance(text, str):
            raise invalid(place, f"text (the policy reads nothing else), or parts of type {' or '.join(kinds)}", part)
        texts.append(text)
    return "".join(texts)
