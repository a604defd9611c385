"""Writes requests for replies, and reads the responses to them, in the JSON of vLLM's endpoint for token ids."""

from __future__ import annotations

from typing import Any

from rollout_server.engines.base import GenerationRequest
from rollout_server.engines.http_engine import cache_key
from rollout_server.engines.open_reply import OpenReply


def group_replies(replies: list[OpenReply]) -> list[list[OpenReply]]:
    """Return `replies` in lists, one for each request: all without a token share one, each other has one of its own."""
    new = [reply for reply in replies if not reply.tokens]
    return ([new] if new else []) + [[reply] for reply in replies if reply.tokens]


def request_body(
    request: GenerationRequest, replies: list[OpenReply], end_tokens: list[int], key: str, priority: int
) -> dict[str, Any]:
    """Return the body of a request that samples the missing rest of `replies`, which have the same tokens so far.

    It sets every parameter that could exclude tokens from sampling, even if to vLLM's default.

    Args:
        key: the id of the request.
        priority: vLLM's scheduler prefers requests with lower ones.
    """
    sampled = replies[0].tokens
    return {
        "request_id": key, "token_ids": request.prompt.tokens.tolist() + sampled, "priority": priority,
        "cache_salt": cache_key(request),
        "sampling_params": {
            "n": len(replies), "max_tokens": request.max_tokens - len(sampled), "temperature": request.temperature,
            "top_p": request.top_p, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
            "presence_penalty": 0.0, "logprobs": 0, "ignore_eos": True, "stop_token_ids": end_tokens,
            "detokenize": False,
        },
    }


def extend_reply(
    reply: OpenReply, choice: dict[str, Any], max_tokens: int, end_tokens: list[int], *, may_abort: bool
) -> None:
    """Append the tokens of one choice of a response to `reply`, and set its finish_reason if it has ended.

    AsyncRLError: see OpenReply.extend.
    """
    logprobs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()]
    reply.extend(
        choice["token_ids"] or [], logprobs, choice["weight_versions"], choice["finish_reason"],
        max_tokens=max_tokens, end_tokens=end_tokens, may_abort=may_abort,
    )
