from __future__ import annotations

import asyncio

import numpy as np
import openai
import pytest

from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import user
from rollout_server.episodes.endpoint.server import AgentEndpoint, OpenSession
from tests.kit.engines.fakes import completion
from tests.kit.episodes.endpoint import ADD, ASK, ENDS, TOKENIZER, client, post, with_session

CALL = 'I add.\n<tool_call>\n{"name":"add",  "arguments":{"a":17,"b":25}}\n</tool_call>'


def test_the_key_is_part_of_the_url_or_the_bearer_token() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        root = opened.base_url.partition("/s/")[0]
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=opened.key) as llm:
            assert [model.id async for model in llm.models.list()] == ["policy"]
            await llm.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
        async with openai.AsyncOpenAI(base_url=f"{root}/v1", api_key="other") as llm:
            with pytest.raises(openai.AuthenticationError):
                await llm.models.list()

    assert with_session(agent, "a").num_turns == 1


def test_a_retry_after_a_timeout_finds_the_reply_that_is_under_way() -> None:
    calls = 0

    async def slow(tokens: list[int], max_tokens: int) -> SampledReply:
        nonlocal calls
        calls += 1
        await asyncio.sleep(1.0)
        return completion([5, ENDS[0]])

    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        async with client(opened, timeout=0.4, max_retries=5) as llm:
            await llm.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
        assert endpoint.counts["retries"] >= 1 and calls == 1

    session = with_session(agent, generate=slow)
    assert len(session.rows()) == 1 and session.num_turns == 1


@pytest.mark.parametrize(
    ("limits", "code"), [({"max_turns": 1}, "no_turn_left"), ({"max_tokens": 120}, "context_length_exceeded")]
)
def test_the_end_of_the_room_is_an_error_that_agents_know(limits: dict[str, int], code: str) -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        messages = [user("hi")]
        await post(opened, {"messages": messages})
        messages += [{"role": "assistant", "content": "a"}, user("fox " * 100)]
        async with client(opened) as llm:
            with pytest.raises(openai.BadRequestError) as refused:
                await llm.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
        assert refused.value.code == code and opened.over is not None

    assert with_session(agent, "a", "b", **limits).num_turns == 1


def test_a_call_after_the_end_gets_410_and_is_counted() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        await opened.session.close()
        assert (await post(opened, ASK))[0] == 410
        endpoint.end(opened.key)
        status, _, headers = await post(opened, ASK)
        assert (status, headers["x-should-retry"], endpoint.counts["late"]) == (410, "false", 1)

    assert with_session(agent, "a").rows() == []


def test_equal_requests_at_the_same_time_get_a_sample_each() -> None:
    async def slow(tokens: list[int], max_tokens: int) -> SampledReply:
        await asyncio.sleep(0.2)
        return completion([5, ENDS[0]])

    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        answers = await asyncio.gather(*(post(opened, ASK, **{"x-stainless-retry-count": "0"}) for _ in range(100)))
        assert {status for status, *_ in answers} == {200}
        assert len({body["id"] for _, body, _ in answers}) == 100 and opened.num_running == 0

    session = with_session(agent, generate=slow, max_turns=200)
    assert session.num_turns == len(session.rows()) == 100


def test_tool_choice_none_leaves_the_tools_out_of_the_prompt() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        for choice, is_call in (("auto", True), ("none", False)):
            _, body, _ = await post(opened, {**ASK, "tools": [ADD], "tool_choice": choice})
            assert ("tool_calls" in body["choices"][0]["message"]) is is_call
        assert endpoint.counts["ignored/tool_choice"] == 0 and endpoint.notes == []

    with_tool, without = with_session(agent, CALL, CALL).rows()
    assert "Add" in TOKENIZER.decode(with_tool.tokens) and "Add" not in TOKENIZER.decode(without.tokens)


def test_stop_and_max_tokens_shorten_a_reply() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        _, body, _ = await post(opened, {**ASK, "stop": "lazy", "max_completion_tokens": 150})
        (choice,) = body["choices"]
        assert choice["message"]["content"] == "The " and choice["finish_reason"] == "stop"

    (row,) = with_session(agent, "The lazy dog.").rows()
    assert TOKENIZER.decode(row.tokens[row.mask]) in ("The lazy", "The lazy dog.") and np.all(row.versions == 0)
