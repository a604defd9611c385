"""Anthropic's messages: POST /messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

from rollout_server.episodes.conversation.chat_messages import ToolCall
from rollout_server.episodes.conversation.session import Reply
from rollout_server.episodes.endpoint.request import (
    AgentRequest,
    Api,
    RequestRefusedError,
    checked_length,
    checked_list,
    checked_messages,
    checked_stop,
    flat_tools,
    ignored_in,
    invalid,
    refuse_unknown,
    sse,
    text_of,
)

_IGNORED: dict[str, tuple[Any, ...]] = {
    "temperature": (), "top_p": (), "top_k": (), "thinking": ({"type": "disabled"},), "output_config": ({},),
    "context_management": ({}, {"edits": []}), "tool_choice": ({"type": "auto"}, {"type": "none"}),
}  # fmt: skip
_KNOWN = frozenset([
    "max_tokens", "messages", "model", "stop_sequences", "stream", "system", "tools", *_IGNORED,
    "cache_control", "inference_geo", "metadata", "service_tier", "speed",  # they don't change a reply
])  # fmt: skip
_TEXT = {"text": "text"}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}


def read(body: Any) -> AgentRequest:
    """Check a JSON body and return it as a request.

    Raises:
        RequestRefusedError: the body is invalid, or has a parameter that is not supported.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise invalid("messages", "a list of messages", body)
    refuse_unknown(body, _KNOWN, {})
    choice, tools = body.get("tool_choice"), flat_tools(body.get("tools"), (None, "custom"), "input_schema")
    return AgentRequest(
        messages=checked_messages(_messages(body)), max_tokens=checked_length(body, "max_tokens"),
        tools=[] if isinstance(choice, dict) and choice.get("type") == "none" else tools,
        stop=checked_stop(body.get("stop_sequences"), "stop_sequences"), stream=bool(body.get("stream")),
        model=str(body.get("model", "policy")), ignored=ignored_in(body, _IGNORED),
    )  # fmt: skip


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a body as chat messages. Each result of a tool becomes a message of its own.

    Neighbouring messages of the assistant become one, as in Anthropic's API.
    """
    messages: list[dict[str, Any]] = []
    if system := text_of(body.get("system"), "system", _TEXT):
        messages.append({"role": "system", "content": system})
    for position, message in enumerate(body["messages"]):
        place = f"messages[{position}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise invalid(place, "an object with the role user, assistant or system", message)
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        new = _chat_messages(role, checked_list(blocks, f"{place}.content"), place)
        if role == "assistant" and messages and messages[-1]["role"] == role:
            last, (more,) = messages[-1], new
            last["content"] += more["content"]
            last.setdefault("tool_calls", []).extend(more.get("tool_calls", ()))
        else:
            messages += new
    return messages


def _chat_messages(role: str, blocks: list[Any], place: str) -> list[dict[str, Any]]:
    """Return the blocks of one message as chat messages, in their order. Neighbouring texts are joined."""
    found: list[dict[str, Any]] = [{"role": role, "content": ""}] if role == "assistant" else []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result" and role == "user":
            text = text_of(block.get("content"), place, _TEXT)
            found.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input"))}
            found[-1].setdefault("tool_calls", []).append({"id": block.get("id"), "function": function})
        else:
            text = text_of([block], place, _TEXT)
            if not found or found[-1]["role"] != role:
                found.append({"role": role, "content": ""})
            found[-1]["content"] += text
    return found


def message(request: AgentRequest, reply: Reply) -> dict[str, Any]:
    """Return the response body for a reply that is not streamed."""
    calls = reply.message.get("tool_calls", [])
    content: list[dict[str, Any]] = [
        {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": _input(call)}
        for call in calls
    ]
    if reply.message["content"] or not calls:
        content.insert(0, {"type": "text", "text": reply.message["content"]})
    return {
        "id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": request.model,
        "content": content, "stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_text or None,
        "usage": {"input_tokens": reply.num_prompt_tokens, "output_tokens": reply.num_tokens},
    }  # fmt: skip


def _input(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of a call as an object. Text that is no JSON object is wrapped in one.

    So is an object with a number that is not finite or with half a surrogate pair, which clients can't read.
    """
    text = call["function"]["arguments"]
    try:
        arguments = json.loads(text)
        json.dumps(arguments, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}


def _stop_reason(reply: Reply) -> str:
    if reply.finish_reason == "length":
        return "max_tokens"
    if reply.message.get("tool_calls"):
        return "tool_use"
    return "stop_sequence" if reply.stop_text else "end_turn"


def events(request: AgentRequest, reply: Reply) -> Iterator[bytes]:
    """Yield the events of a streamed response. Each block of the content is one delta."""
    whole = message(request, reply)

    def event(kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, **fields}, kind)

    ending = {key: whole.pop(key) for key in ("stop_reason", "stop_sequence")}
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    yield event("message_start", message={**begun, "usage": {**whole["usage"], "output_tokens": 0}})
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield event("content_block_start", index=index, content_block=empty)
        yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event("message_delta", delta=ending, usage=whole["usage"])
    yield event("message_stop")


def error(refused: RequestRefusedError) -> dict[str, Any]:
    """Return an error in Anthropic's format; `code` is this endpoint's own."""
    kind = _ERRORS.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused), "code": refused.code}}


MESSAGES = Api(read=read, body=message, events=events, error=error)
