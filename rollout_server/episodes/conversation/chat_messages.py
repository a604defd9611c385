"""The messages of a conversation, in the format of OpenAI's chat completions, and digests to compare conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Required, TypedDict

Schema = dict[str, Any]
"""The description of a tool: {"type": "function", "function": {"name", "description", "parameters"}}."""


class FunctionCall(TypedDict):
    """The name of a called tool, and its arguments as JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    """One tool call of a reply."""

    id: str
    type: str
    function: FunctionCall


class Message(TypedDict, total=False):
    """One chat message. The model's replies have the role `assistant`, and the field `tool_calls` if they call tools.
    """

    role: Required[str]
    content: Required[str]
    tool_calls: list[ToolCall]
    tool_call_id: str
    """Only for the role `tool`: the id of the call that the message answers."""
    name: str
    """Only for the role `tool`: the tool's name."""


ROLES = ("system", "user", "assistant", "tool")
"""The allowed roles. `developer`, OpenAI's newer name of `system`, is read as `system`."""


def user(text: str) -> Message:
    """Return a message with the role `user` and this text."""
    return {"role": "user", "content": text}


def plain_messages(messages: Iterable[dict[str, Any]]) -> list[Message]:
    """Check the messages of an agent or environment, and return them with each content as one text.

    Content that is null or a list of parts is converted.

    Raises:
        ValueError: a message has a role that is not in ROLES, content that is not text, or malformed tool calls.
    """
    plain: list[Message] = []
    for position, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{position}] must be an object with a role, got {message!r:.200}")
        role = "system" if message["role"] == "developer" else message["role"]
        if role not in ROLES:
            raise ValueError(
                f"messages[{position}].role must be {', '.join(ROLES)} or developer, got {role!r:.200}"
                + (": give a tool's result the role tool" if role == "function" else "")
            )
        kept: Message = {"role": role, "content": _plain_text(message.get("content"), position)}
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise ValueError(f"messages[{position}].tool_calls must be a list, got {calls!r:.200}")
            kept["tool_calls"] = [_tool_call(call, position) for call in calls]
        for name in ("tool_call_id", "name"):
            if isinstance(message.get(name), str):
                kept[name] = message[name]  # type: ignore[literal-required]
        plain.append(kept)
    return plain


def _plain_text(content: Any, position: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError(f"messages[{position}].content must be text or a list of text parts, got {content!r:.200}")
    return "".join(_part_text(part, position) for part in content)


def _part_text(part: Any, position: int) -> str:
    """Return the text of one part of a message's content, which must be a `text` or an assistant's `refusal`."""
    kind = part.get("type", "text") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if isinstance(text, str):
        return text
    if isinstance(kind, str) and kind not in ("text", "refusal"):
        raise ValueError(
            f"messages[{position}].content has a part of the type {kind!r:.50}: the policy reads text only, no images, "
            "sounds or files"
        )
    raise ValueError(f"messages[{position}].content must be text or a list of text parts, got the part {part!r:.200}")


def _tool_call(call: Any, position: int) -> ToolCall:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not (isinstance(name, str) and isinstance(arguments, str)):
            raise TypeError
    except (KeyError, TypeError):
        raise ValueError(
            f"messages[{position}].tool_calls must hold objects with function.name and function.arguments as text, "
            f"got {call!r:.200}"
        ) from None
    return {
        "id": str(call.get("id", "")),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def tools_text(tools: Sequence[Schema]) -> str:
    """Return the descriptions of tools as compact JSON. Equal descriptions give equal text."""
    return json.dumps(list(tools), sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def prefix_digests(messages: Sequence[Message], tools: Sequence[Schema]) -> list[bytes]:
    """Return len(messages) + 1 digests: entry n is the digest of the first n messages, with the tools.

    Equal digests mean the same conversation with the same tools. Ids, `name`, white space around replies and the JSON
    spelling of arguments are left out, because agents change them.
    """
    digests = [_digest(b"", [tools_text(tools)])]
    for message in messages:
        digests.append(extended_digest(digests[-1], message))
    return digests


def extended_digest(digest: bytes, message: Message) -> bytes:
    """Return the digest of a conversation after one more message.

    Args:
        digest: the digest of the conversation without that message.
    """
    return _digest(digest, _identity(message))


def _digest(before: bytes, parts: list[str]) -> bytes:
    digest = blake2b(before, digest_size=16)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))  # so that no two lists of parts are the same bytes
        digest.update(data)
    return digest.digest()


def _identity(message: Message) -> list[str]:
    role, text = message["role"], message["content"]
    calls = [part for call in message.get("tool_calls", ()) for part in _call_identity(call)]
    return [role, text.strip() if role == "assistant" else text, *calls]


def _call_identity(call: ToolCall) -> list[str]:
    arguments = call["function"]["arguments"]
    with suppress(ValueError, RecursionError):  # it is no JSON, or nested too deeply: compared as it is
        arguments = json.dumps(json.loads(arguments), sort_keys=True)
    return [call["function"]["name"], arguments]
