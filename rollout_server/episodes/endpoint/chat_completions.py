"""OpenAI's chat completions: POST /chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from rollout_server.episodes.conversation.chat_messages import Schema
from rollout_server.episodes.conversation.session import Reply
from rollout_server.episodes.endpoint.request import (
    IGNORED,
    AgentRequest,
    Api,
    RequestRefusedError,
    checked_length,
    checked_list,
    checked_messages,
    checked_stop,
    ignored_in,
    invalid,
    refuse_unknown,
    sse,
    tool_schema,
)

_IGNORED: dict[str, tuple[Any, ...]] = {**IGNORED, "verbosity": ()}
WITHOUT_EFFECT = (
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
    "stream_options", "user",
)  # fmt: skip
"""OpenAI's parameters that don't change a reply. Nothing is stored, whatever `store` says."""
_KNOWN = frozenset([
    "max_completion_tokens", "max_tokens", "messages", "model", "stop", "stream", "tools", *_IGNORED, *WITHOUT_EFFECT,
])  # fmt: skip
_NOTHING = {"n": 1, "best_of": 1, "length_penalty": 1.0, "function_call": "auto", "modalities": ["text"]}


def read(body: Any) -> AgentRequest:
    """Check a JSON body and return it as a request.

    Raises:
        RequestRefusedError: the body is invalid, or has a parameter that is not supported.
    """
    if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
        raise invalid("messages", "a list of messages", body)
    refuse_unknown(body, _KNOWN, _NOTHING)
    tools, options = _tools(body.get("tools")), body.get("stream_options")
    return AgentRequest(
        messages=checked_messages(body["messages"]), stop=checked_stop(body.get("stop"), "stop"),
        max_tokens=checked_length(body, "max_completion_tokens", "max_tokens"),
        # "none" asks for a reply without calls: the model hardly calls tools that are not described to it.
        tools=[] if body.get("tool_choice") == "none" else tools,
        stream=bool(body.get("stream")), model=str(body.get("model", "policy")),
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        ignored=ignored_in(body, _IGNORED),
    )  # fmt: skip


def _tools(tools: Any) -> list[Schema]:
    if tools is None:
        return []
    found = []
    for tool in checked_list(tools, "tools"):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid("tools", "objects of the type function, with function.name", tools)
        found.append(tool_schema(function))
    return found


def _head(request: AgentRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": request.model}


def completion(request: AgentRequest, reply: Reply) -> dict[str, Any]:
    """Return the response body for a reply that is not streamed."""
    message = {**reply.message, "refusal": None}
    if not reply.message["content"] and "tool_calls" in reply.message:
        message["content"] = None
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
    return {**_head(request, "chat.completion"), "choices": [choice], "usage": _usage(reply)}


def chunks(request: AgentRequest, reply: Reply) -> Iterator[bytes]:
    """Yield the chunks of a streamed response.

    The first chunk has the whole reply, as its calls are not known earlier.
    """
    head = _head(request, "chat.completion.chunk")
    delta: dict[str, Any] = {"role": "assistant", "content": reply.message["content"]}
    if calls := reply.message.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    yield sse({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    yield sse({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(reply)}]})
    if request.stream_usage:
        yield sse({**head, "choices": [], "usage": _usage(reply)})
    yield sse("[DONE]")


def _finish_reason(reply: Reply) -> str:
    """Return OpenAI's reason. A reply that was cut says so, even if it has calls: it may lack others."""
    has_calls = reply.finish_reason != "length" and reply.message.get("tool_calls")
    return "tool_calls" if has_calls else reply.finish_reason


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.num_prompt_tokens + reply.num_tokens
    return {"prompt_tokens": reply.num_prompt_tokens, "completion_tokens": reply.num_tokens, "total_tokens": total}


def openai_error(refused: RequestRefusedError) -> dict[str, Any]:
    """Return an error in OpenAI's format; OpenAI's clients show its message."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


CHAT_COMPLETIONS = Api(read=read, body=completion, events=chunks, error=openai_error)
