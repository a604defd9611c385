"""OpenAI's responses: POST /responses. Each request must contain the whole conversation; the endpoint stores none."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from itertools import count
from typing import Any

from rollout_server.episodes.conversation.session import Reply, is_same_reply
from rollout_server.episodes.endpoint.chat_completions import WITHOUT_EFFECT, openai_error
from rollout_server.episodes.endpoint.request import (
    IGNORED,
    AgentRequest,
    Api,
    checked_length,
    checked_messages,
    flat_tools,
    ignored_in,
    invalid,
    refuse_unknown,
    sse,
    text_of,
)

_IGNORED = {**IGNORED, "reasoning": ({},), "text": ({"format": {"type": "text"}}, {})}
_KNOWN = frozenset([
    "input", "instructions", "max_output_tokens", "model", "stream", "tools", *_IGNORED, *WITHOUT_EFFECT,
])  # fmt: skip
_NOTHING = {"truncation": "disabled", "include": ["reasoning.encrypted_content"]}
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


def read(body: Any) -> AgentRequest:
    """Check a JSON body and return it as a request.

    Raises:
        RequestRefusedError: the body is invalid, or has a parameter that is not supported.
    """
    if not isinstance(body, dict) or not isinstance(body.get("input"), str | list):
        raise invalid("input", "a text or a list of items", body)
    refuse_unknown(body, _KNOWN, _NOTHING)
    tools = flat_tools(body.get("tools"), ("function",), "parameters")
    return AgentRequest(
        messages=checked_messages(_messages(body)), max_tokens=checked_length(body, "max_output_tokens"),
        tools=[] if body.get("tool_choice") == "none" else tools,
        stream=bool(body.get("stream")), model=str(body.get("model", "policy")), ignored=ignored_in(body, _IGNORED),
    )  # fmt: skip


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the items of a body as chat messages. Calls belong to the assistant's message before them.

    Some agents write the outputs of a reply's calls between its calls. Chat messages have all calls first.
    """
    messages: list[dict[str, Any]] = []
    newest: dict[str, Any] = {}  # the newest message that is no output
    if instructions := text_of(body.get("instructions"), "instructions", _PARTS):
        messages.append({"role": "system", "content": instructions})
    items = body["input"]
    for position, item in enumerate([{"role": "user", "content": items}] if isinstance(items, str) else items):
        place = f"input[{position}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            newest = {"role": item.get("role"), "content": text_of(item.get("content"), place, _PARTS)}
            messages.append(newest)
        elif kind == "function_call":
            call = {"id": item.get("call_id"), "function": {key: item.get(key) for key in ("name", "arguments")}}
            if not _has_call(newest, messages, call):
                newest = {"role": "assistant", "content": ""}
                messages.append(newest)
            newest.setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            text = text_of(item.get("output"), place, _PARTS)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        else:
            raise invalid(place, "of the type message, function_call or function_call_output", item)
    return messages


def _has_call(newest: dict[str, Any], messages: list[dict[str, Any]], call: dict[str, Any]) -> bool:
    """Return whether a call belongs to the newest message that is no output.

    It does if that is a message of the assistant without an output after it, or with a call of the same reply.
    """
    if newest.get("role") != "assistant":
        return False
    calls = newest.get("tool_calls")
    return newest is messages[-1] or bool(calls and is_same_reply(calls[-1]["id"], call["id"]))


def response(request: AgentRequest, reply: Reply) -> dict[str, Any]:
    """Return the response body for a reply that is not streamed."""
    is_whole = reply.finish_reason != "length"
    total = reply.num_prompt_tokens + reply.num_tokens
    return {
        "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()),
        "status": "completed" if is_whole else "incomplete", "error": None,
        "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
        "instructions": None, "metadata": {}, "model": request.model, "output": _output(reply, is_whole),
        "parallel_tool_calls": True, "temperature": None, "tool_choice": "auto", "tools": [], "top_p": None,
        "usage": {
            "input_tokens": reply.num_prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.num_tokens, "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        },
    }  # fmt: skip


def _output(reply: Reply, is_whole: bool) -> list[dict[str, Any]]:
    calls = reply.message.get("tool_calls", [])
    items: list[dict[str, Any]] = [
        {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": call["id"], **call["function"]}
        for call in calls
    ]
    if reply.message["content"] or not calls:
        part = {"type": "output_text", "text": reply.message["content"], "annotations": [], "logprobs": []}
        message = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": [part]}
        items.insert(0, message)
    return [{**item, "status": "completed" if is_whole else "incomplete"} for item in items]


def events(request: AgentRequest, reply: Reply) -> Iterator[bytes]:
    """Yield the events of a streamed response. Each text and each call is one delta."""
    whole = response(request, reply)
    numbers = count()

    def event(kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, "sequence_number": next(numbers), **fields}, kind)

    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            (part,) = item["content"]
            at_part = {**at, "content_index": 0}
            empty = {**item, "status": "in_progress", "content": []}
            yield event("response.output_item.added", output_index=index, item=empty)
            yield event("response.content_part.added", **at_part, part={**part, "text": ""})
            yield event("response.output_text.delta", **at_part, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **at_part, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at_part, part=part)
        else:
            arguments = item["arguments"]
            empty = {**item, "status": "in_progress", "arguments": ""}
            yield event("response.output_item.added", output_index=index, item=empty)
            yield event("response.function_call_arguments.delta", **at, delta=arguments)
            yield event("response.function_call_arguments.done", **at, name=item["name"], arguments=arguments)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event(f"response.{whole['status']}", response=whole)


RESPONSES = Api(read=read, body=response, events=events, error=openai_error)
