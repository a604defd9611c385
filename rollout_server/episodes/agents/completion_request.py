"""Reads the body of a request for a chat completion, and refuses what can't be trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rollout_server.episodes.conversation.messages import Message, Schema, plain_messages

IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (), "top_p": (), "top_k": (), "min_p": (), "frequency_penalty": (), "presence_penalty": (),
    "repetition_penalty": (), "seed": (), "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,), "reasoning_effort": (),
}  # fmt: skip
"""Parameters that are accepted and have no effect: they would change how the policy samples, or need a constrained
decoder, whose logprobs are of another distribution. Each has the values that are honoured, besides null."""
_REFUSED = {
    "n": 1, "logit_bias": {}, "logprobs": False, "top_logprobs": 0, "functions": [], "audio": None, "prediction": None,
}  # fmt: skip
"""The parameters that can't be honoured, each with the value that asks for nothing; others get status 400."""


class RequestRefusedError(Exception):
    """An agent's request is refused: it is answered with HTTP status `status`, and `code` and the message in JSON."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """An agent's request for the next message of a conversation: the body of POST .../chat/completions, checked."""

    messages: list[Message]
    tools: list[Schema]
    max_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    stream_usage: bool
    model: str
    ignored: tuple[str, ...]
    """The names of parameters that are set to a value without effect."""

    @classmethod
    def from_body(cls, body: Any) -> CompletionRequest:
        """Return the request that a JSON body holds.

        Raises:
            RequestRefusedError: the body is invalid, or asks for what can't be given.
        """
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise _invalid("messages", "a list of messages", body)
        if refused := [key for key, nothing in _REFUSED.items() if body.get(key) not in (None, nothing)]:
            raise RequestRefusedError(
                400, "unsupported", f"the policy can't be trained on a reply with {', '.join(refused)}: leave it out"
            )
        tools, options = _tools(body.get("tools")), body.get("stream_options")
        return cls(
            messages=_messages(body["messages"]), max_tokens=_max_tokens(body), stop=_stop(body.get("stop")),
            # Without their descriptions the model can hardly call tools, which is what "none" asks for.
            tools=[] if body.get("tool_choice") == "none" else tools,
            stream=bool(body.get("stream")), model=str(body.get("model", "policy")),
            stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            ignored=tuple(key for key, honoured in IGNORED.items() if body.get(key) not in (None, *honoured)),
        )  # fmt: skip


def _messages(messages: list[Any]) -> list[Message]:
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
                f"messages[{position}] has the role tool, and no message before it has tool_calls: keep the reply with "
                "the call before its result",
            )  # fmt: skip
    return plain


def _max_tokens(body: dict[str, Any]) -> int | None:
    """Return the lowest of the two limits of a reply that a body may hold; None if it holds none."""
    found = {name: body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None}
    for name, value in found.items():
        if type(value) is not int or value < 1:
            raise _invalid(name, "a whole number from 1", value)
    return min(found.values(), default=None)


def _tools(tools: Any) -> list[Schema]:
    if tools is None:
        return []
    functions = [tool.get("function") if isinstance(tool, dict) else None for tool in _list(tools, "tools")]
    for function in functions:
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _invalid("tools", "objects of the type function, with function.name", tools)
    return [{"type": "function", "function": function} for function in functions]


def _stop(stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else _list(stop or [], "stop")
    if not all(isinstance(text, str) and text for text in texts):
        raise _invalid("stop", "texts", stop)
    return tuple(texts)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _invalid(name, "a list", value)
    return value


def _invalid(name: str, allowed: str, value: Any) -> RequestRefusedError:
    return RequestRefusedError(400, "invalid_request", f"{name} must be {allowed}, got {value!r:.200}")
