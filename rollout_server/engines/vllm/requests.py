"""Requests for answers and their replies, in the JSON of vLLM's endpoint for token ids."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from async_rl.errors import AsyncRLError
from async_rl.types import IntArray
from rollout_server.engines.base import Completion, GenerationRequest


@dataclass(slots=True)
class Answer:
    """One answer while it grows. It needs more than one request only if a push aborts the first."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    """`stop` or `length`; empty until the answer has ended."""

    def completion(self) -> Completion:
        return Completion(
            tokens=np.array(self.tokens, dtype=np.int32), logprobs=np.array(self.logprobs, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int32), finish_reason=self.finish_reason,
        )


def group_answers(answers: list[Answer]) -> list[list[Answer]]:
    """Return which answers share a request: all that have no token yet, and each other by itself."""
    new = [answer for answer in answers if not answer.tokens]
    return ([new] if new else []) + [[answer] for answer in answers if answer.tokens]


def request_body(
    request: GenerationRequest, answers: list[Answer], end_tokens: list[int], key: str, priority: int
) -> dict[str, Any]:
    """Return the body of a request that samples the missing rest of `answers`, which have the same tokens so far.

    It sets every parameter that could exclude tokens from sampling, even if to vLLM's default.

    Args:
        key: the id of the request.
        priority: vLLM's scheduler prefers requests with lower ones.
    """
    sampled = answers[0].tokens
    return {
        "request_id": key, "token_ids": request.prompt.tokens.tolist() + sampled, "priority": priority,
        # No request reads the KV of another group, which may come from older weights: an update in place keeps it.
        "cache_salt": key,
        "sampling_params": {
            "n": len(answers), "max_tokens": request.max_tokens - len(sampled), "temperature": request.temperature,
            "top_p": request.top_p, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "frequency_penalty": 0.0,
            "presence_penalty": 0.0, "logprobs": 0, "ignore_eos": True, "stop_token_ids": end_tokens,
            "detokenize": False,
        },
    }


def extend_answer(answer: Answer, choice: dict[str, Any], max_tokens: int, end_tokens: list[int]) -> None:
    """Append the tokens of one choice of a reply to `answer`, and set its finish_reason if it has ended.

    Raises:
        AsyncRLError: the choice is incomplete, or ended for a reason other than stop, length or an abort.
    """
    tokens, finish = choice["token_ids"] or [], choice["finish_reason"]
    logprobs = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or ()]
    if not (tokens or finish == "abort") or len(logprobs) != len(tokens):
        raise AsyncRLError(
            f"vLLM must send one logprob for each token, got {len(tokens)} tokens and logprobs {logprobs[:20]}"
        )
    answer.tokens += tokens
    answer.logprobs += logprobs
    answer.versions += token_versions(choice["weight_versions"], len(tokens)).tolist()
    aborted = finish == "abort"
    if finish == "stop" or (aborted and tokens and tokens[-1] in end_tokens):  # an abort can come with the last token
        answer.finish_reason = "stop"
    elif finish == "length" or (aborted and len(answer.tokens) == max_tokens):
        answer.finish_reason = "length"
    elif not aborted:
        raise AsyncRLError(f"vLLM did not finish an answer: finish_reason {finish}")


def token_versions(spans: list[dict[str, Any]] | None, num_tokens: int) -> IntArray:
    """Return the version of each token, [num_tokens], from vLLM's spans `{version, start, end}`.

    Raises:
        AsyncRLError: the spans do not cover the tokens in order.
    """
    versions = np.empty(num_tokens, dtype=np.int32)
    covered = 0
    for span in spans or ():
        if span["start"] != covered or not str(span["version"]).isdecimal():
            break
        covered = span["end"]
        versions[span["start"] : covered] = int(span["version"])
    if covered != num_tokens:
        raise AsyncRLError(
            f"vLLM's weight_versions must cover {num_tokens} tokens with whole-number versions, got {spans}. "
            "vLLM 0.32 or newer reports them."
        )
    return versions
