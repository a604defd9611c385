from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest

from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import user
from rollout_server.episodes.endpoint.server import AgentEndpoint, OpenSession
from tests.kit.engines.fakes import completion
from tests.kit.episodes.endpoint import ADD, ASK, ENDS, TOKENIZER, client, post, with_session
from tests.kit.episodes.example_tools import add

CALL = 'I add.\n<tool_call>\n{"name":"add",  "arguments":{"a":17,"b":25}}\n</tool_call>'
TWO_CALLS = "".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {a}}}}}</tool_call>' for a in (1, 2))


def test_a_tool_loop_of_the_openai_sdk_is_one_exact_row() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        messages: list[Any] = [{"role": "user", "content": "17+25?"}]
        async with client(opened) as llm:
            while True:
                answer = await llm.chat.completions.create(
                    model="policy", messages=messages, tools=[ADD], temperature=0.2,  # type: ignore[list-item]
                )  # fmt: skip
                message = answer.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                if not message.tool_calls:
                    break
                assert answer.choices[0].finish_reason == "tool_calls" and message.content == "I add."
                for call in message.tool_calls:
                    result = add(**json.loads(call.function.arguments))  # type: ignore[union-attr]
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
        assert message.content == "It is 42." and answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(TOKENIZER("It is 42.")["input_ids"]) + 1  # type: ignore[union-attr]
        assert endpoint.counts["ignored/temperature"] == endpoint.counts["requests"] == 2

    session = with_session(agent, CALL, "It is 42.")
    (row,) = session.rows()
    assert TOKENIZER.decode(row.tokens[row.mask]) == f"{CALL}<|im_end|>It is 42.<|im_end|>"
    assert "<tool_response>\n42\n</tool_response>" in TOKENIZER.decode(row.tokens)
    assert session.counts.rewritten == 0


def test_a_stream_carries_the_reply_its_calls_and_the_usage() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        async with client(opened) as llm:
            stream = await llm.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "hi"}], tools=[ADD],  # type: ignore[list-item]
                stream=True, stream_options={"include_usage": True},
            )  # fmt: skip
            chunks = [chunk async for chunk in stream]
        calls = [call for chunk in chunks for choice in chunk.choices for call in choice.delta.tool_calls or ()]
        assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [  # type: ignore[union-attr]
            (0, "add", '{"a": 1}'), (1, "add", '{"a": 2}')
        ]  # fmt: skip
        assert len({call.id for call in calls}) == 2
        assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "tool_calls"]
        assert chunks[-1].usage.total_tokens > 0 and chunks[0].model == "m"  # type: ignore[union-attr]

    with_session(agent, TWO_CALLS)


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


REFUSED: list[tuple[dict[str, Any] | None, str]] = [
    ({"n": 2}, "n"), ({"logprobs": True}, "logprobs"), ({"messages": []}, ""), ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0]"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "'wizard'"),
    ({"messages": [user("a"), {"role": "tool", "content": "4"}]}, "messages[1]"),
    ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, ""),
    ({"messages": [user("a"), {"role": "assistant", "tool_calls": [{}]}, user("b")]}, "function.name"),
    ({"max_tokens": 0}, "max_tokens"), ({"max_completion_tokens": "5", "max_tokens": 5}, "max_completion_tokens"),
    ({"tools": [{"type": "web_search"}]}, "tools"), ({"stop": [5]}, "stop"), (None, "JSON"),
]  # fmt: skip
"""(What is wrong with a request, what its refusal names)."""


def test_a_request_that_can_not_be_honoured_gets_400_and_no_retry() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        async with aiohttp.ClientSession() as http:
            for change, named in REFUSED:
                data = "{" if change is None else json.dumps({**ASK, **change})
                async with http.post(f"{opened.base_url}/chat/completions", data=data) as reply:
                    assert (reply.status, reply.headers["x-should-retry"]) == (400, "false"), change
                    assert named in (await reply.json())["error"]["message"], change
            for method, path, status in (("POST", "/completions", 404), ("GET", "/chat/completions", 405)):
                async with http.request(method, opened.base_url + path, json=ASK) as reply:
                    assert (reply.status, reply.headers["x-should-retry"]) == (status, "false")
        assert (await post(opened, {"messages": [user("x" * 2**24)]}))[0] == 413

    assert with_session(agent, "a").num_turns == 0


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
