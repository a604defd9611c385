"""Replies that the engines with a server read from its responses; no server is needed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from async_rl.base.errors import AsyncRLError
from rollout_server.engines.http_engine import OpenReply
from rollout_server.engines.sglang import engine as sglang
from rollout_server.engines.vllm import engine as vllm

VERSIONS = ({"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2})
pytestmark = pytest.mark.parametrize("engine", ["sglang", "vllm"])


def extended(
    engine: str, before: OpenReply | None = None, *, tokens: Sequence[int] = (7, 8),
    logprobs: Sequence[float | None] | None = (-1.5, -2.0), versions: Any = VERSIONS, finish: str = "length",
    max_tokens: int = 2,
) -> OpenReply:
    """A reply, by default a new one, with the tokens of a response."""
    reply = before or OpenReply()
    if engine == "sglang":
        entries = logprobs and [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=False)]
        meta = {"finish_reason": {"type": finish}, "output_token_logprobs": entries, "weight_versions": versions}
        response = {"output_ids": list(tokens), "meta_info": meta}
        sglang.extend_reply(reply, response, max_tokens, end_tokens=[2, 5], may_abort=True)
    else:
        content = logprobs and {"content": [{"logprob": logprob} for logprob in logprobs]}
        choice = {"token_ids": list(tokens), "finish_reason": finish, "logprobs": content, "weight_versions": versions}
        vllm.extend_reply(reply, choice, max_tokens, end_tokens=[2, 5], may_abort=True)
    return reply


def test_a_reply_becomes_tokens_logprobs_and_versions(engine: str) -> None:
    reply = extended(engine).reply()
    assert reply.tokens.tolist() == [7, 8] and reply.tokens.dtype == np.int32
    assert reply.logprobs.tolist() == [-1.5, -2.0] and reply.logprobs.dtype == np.float32
    assert reply.versions.tolist() == [3, 4] and reply.finish_reason == "length"


def test_an_aborted_answer_goes_on_with_the_next_response(engine: str) -> None:
    begun = extended(engine, finish="abort", max_tokens=4)
    assert begun.finish_reason == ""
    whole = extended(engine, begun, versions=[{"version": "6", "start": 0, "end": 2}], max_tokens=4)
    assert (whole.tokens, whole.versions) == ([7, 8, 7, 8], [3, 4, 6, 6])
    assert whole.logprobs == [-1.5, -2.0, -1.5, -2.0] and whole.finish_reason == "length"


@pytest.mark.parametrize(("last", "max_tokens", "reason"), [(5, 9, "stop"), (8, 2, "length"), (8, 3, "")])
def test_an_abort_together_with_the_last_token_ends_the_answer(
    engine: str, last: int, max_tokens: int, reason: str
) -> None:
    assert extended(engine, tokens=(7, last), finish="abort", max_tokens=max_tokens).finish_reason == reason


@pytest.mark.parametrize("before", [{}, {"tokens": [9], "logprobs": [-1.0], "versions": [2]}])
@pytest.mark.parametrize("versions", [None, [{"version": "3", "start": 0, "end": 0}]])
def test_a_request_aborted_before_its_first_token_leaves_the_answer_as_it_was(
    engine: str, before: dict[str, Any], versions: Any
) -> None:
    nothing = {"tokens": (), "logprobs": None, "versions": versions, "finish": "abort"}
    assert extended(engine, OpenReply(**copy.deepcopy(before)), **nothing) == OpenReply(**before)


@pytest.mark.parametrize(("changes", "named"), [
    ({"logprobs": [-1.5]}, "logprob"), ({"logprobs": [-1.5, None]}, "logprob"),
    ({"tokens": (), "logprobs": None}, "logprob"), ({"finish": "error"}, "error"),
    *(({"versions": spans}, "version") for spans in (
        None, [], [{"version": "default", "start": 0, "end": 2}], [{"version": "1", "start": 0, "end": 1}],
        [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 2, "end": 3}],
    )),
])
def test_an_incomplete_reply_is_refused(engine: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(AsyncRLError, match=named):
        extended(engine, **changes)
