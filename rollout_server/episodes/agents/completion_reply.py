"""Writes a reply as the body of an answer to a request for a chat completion, in the form of OpenAI's."""

from __future__ import annotations

from typing import Any

from rollout_server.episodes.conversation.session import Reply


def completion(reply: Reply) -> dict[str, Any]:
    """Return the body of an answer that is not streamed."""
    message = {**reply.message, "refusal": None}
    if not reply.message["content"] and "tool_calls" in reply.message:
        message["content"] = None
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(reply), "logprobs": None}
    return {"choices": [choice], "usage": _usage(reply)}


def chunks(reply: Reply, with_usage: bool) -> list[dict[str, Any]]:
    """Return the chunks of a streamed answer. The first holds the whole reply, as its calls are not known earlier."""
    delta: dict[str, Any] = {"role": "assistant", "content": reply.message["content"]}
    if calls := reply.message.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    parts: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(reply)}]},
    ]
    return [*parts, {"choices": [], "usage": _usage(reply)}] if with_usage else parts


def _finish_reason(reply: Reply) -> str:
    return "tool_calls" if reply.message.get("tool_calls") else reply.finish_reason


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.num_prompt_tokens + reply.num_tokens
    return {"prompt_tokens": reply.num_prompt_tokens, "completion_tokens": reply.num_tokens, "total_tokens": total}
