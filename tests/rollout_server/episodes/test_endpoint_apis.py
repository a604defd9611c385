"""Chat completions, responses and messages, by the official clients: the same conversation is the same row."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest

from rollout_server.engines.base import SampledReply
from rollout_server.episodes.conversation.chat_messages import Message, ToolCall, user
from rollout_server.episodes.conversation.session import Reply
from rollout_server.episodes.endpoint.chat_completions import CHAT_COMPLETIONS
from rollout_server.episodes.endpoint.messages import MESSAGES
from rollout_server.episodes.endpoint.request import AgentRequest
from rollout_server.episodes.endpoint.responses import RESPONSES
from rollout_server.episodes.endpoint.server import AgentEndpoint, OpenSession
from tests.kit.episodes.endpoint import ADD, ASK, TOKENIZER, client, post, with_session
from tests.kit.episodes.example_tools import add

QUESTION, ANSWER = "17+25, and 1+2?", "42 and 3."
CALLS = "I add.\n" + "\n".join(
    f'<tool_call>\n{{"name":"add",  "arguments":{{"a":{a},"b":{b}}}}}\n</tool_call>' for a, b in ((17, 25), (1, 2))
)
CHAT_TOOL = {"type": "function", "function": {"strict": True, **dict(reversed(ADD["function"].items()))}}
NAME, DESCRIPTION, PARAMETERS = (ADD["function"][key] for key in ("name", "description", "parameters"))


def claude(opened: OpenSession, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=opened.base_url, api_key="none", **options)


async def chat_agent(opened: OpenSession, streams: bool) -> str:
    """Play with OpenAI's chat completions until the model answers, and return the answer."""
    messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": QUESTION}]
    async with client(opened) as llm:
        while True:
            asked: dict[str, Any] = {"model": "policy", "messages": messages, "tools": [CHAT_TOOL]}
            if streams:
                chunks = [chunk async for chunk in await llm.chat.completions.create(**asked, stream=True)]
                message: Any = chunks[0].choices[0].delta
            else:
                message = (await llm.chat.completions.create(**asked)).choices[0].message
            messages.append({"role": "assistant", "content": message.content})
            if not message.tool_calls:
                return message.content
            kept = {"id", "type", "function"}
            messages[-1]["tool_calls"] = [call.model_dump(include=kept) for call in message.tool_calls]
            for call in message.tool_calls:
                result = add(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})


async def responses_agent(opened: OpenSession, streams: bool) -> str:
    """Play with OpenAI's responses until the model answers, and return the answer."""
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    tool: Any = {"type": "function", "name": NAME, "description": DESCRIPTION, "parameters": PARAMETERS, "strict": True}
    async with client(opened) as llm:
        while True:
            asked: dict[str, Any] = {"model": "policy", "instructions": "Add.", "input": items, "tools": [tool]}
            if streams:
                async with llm.responses.stream(**asked) as stream:
                    response: Any = await stream.get_final_response()
            else:
                response = await llm.responses.create(**asked)
            assert response.status == "completed" and response.usage.output_tokens > 0
            items += [item.model_dump(exclude={"parsed", "parsed_arguments"}) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for call in calls:
                output = str(add(**json.loads(call.arguments)))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


async def messages_agent(opened: OpenSession, streams: bool) -> str:
    """Play with Anthropic's messages until the model answers, and return the answer."""
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tool: Any = {"name": NAME, "description": DESCRIPTION, "input_schema": PARAMETERS}
    async with claude(opened) as llm:
        while True:
            asked: dict[str, Any] = {
                "model": "policy", "max_tokens": 200, "messages": messages, "tools": [tool],
                "system": [{"type": "text", "text": "Add.", "cache_control": {"type": "ephemeral"}}],
            }  # fmt: skip
            if streams:
                async with llm.messages.stream(**asked) as stream:
                    message = await stream.get_final_message()
            else:
                message = await llm.messages.create(**asked)
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            assert message.stop_reason == ("tool_use" if calls else "end_turn") and message.usage.output_tokens > 0
            if not calls:
                return message.content[0].text  # type: ignore[union-attr]
            results = [
                {"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))}  # type: ignore[arg-type]
                for call in calls
            ]
            messages.append({"role": "user", "content": results})


def versioned(*texts: str) -> Callable[[list[int], int], Awaitable[SampledReply]]:
    """Sample these texts. Each token has its own logprob, and every third one a newer version."""
    left, number = list(texts), count()

    async def generate(tokens: list[int], max_tokens: int) -> SampledReply:
        reply = [*TOKENIZER(left.pop(0), add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
        numbers = np.array([next(number) for _ in reply])
        return SampledReply(
            tokens=np.array(reply, np.int32), logprobs=(-1e-3 * numbers).astype(np.float32),
            versions=(numbers // 3).astype(np.int32), finish_reason="stop",
        )  # fmt: skip

    return generate


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("agent", [responses_agent, messages_agent])
def test_every_api_records_the_row_that_chat_completions_record(
    agent: Callable[[OpenSession, bool], Awaitable[str]], streams: bool
) -> None:
    rows = []
    for play, does_stream in ((chat_agent, False), (agent, streams), (chat_agent, True)):

        async def use(endpoint: AgentEndpoint, opened: OpenSession, play: Any = play, does: bool = does_stream) -> None:
            assert await play(opened, does) == ANSWER
            assert endpoint.counts["requests"] == 2 and endpoint.notes == []

        session = with_session(use, generate=versioned(CALLS, ANSWER))
        rows += session.rows()
        assert session.counts.rewritten == 0
    expected, *others = rows
    assert len(others) == 2 and len(set(expected.versions)) > 10
    assert TOKENIZER.decode(expected.tokens[expected.mask]) == f"{CALLS}<|im_end|>{ANSWER}<|im_end|>"
    for row in others:
        for name in ("tokens", "mask", "versions", "logprobs"):
            np.testing.assert_array_equal(getattr(row, name), getattr(expected, name))


def test_a_reply_that_an_agent_tells_in_parts_is_one_message() -> None:
    use = [{"type": "tool_use", "id": str(n), "name": "add", "input": {}} for n in (1, 2)]
    parts = [{"type": "text", "text": "I add."}, *use]
    told = [user("a"), *({"role": "assistant", "content": [part]} for part in parts)]
    _, message = MESSAGES.read({"messages": told}).messages
    assert message["content"] == "I add." and [call["id"] for call in message["tool_calls"]] == ["1", "2"]

    for other, roles in (("c00010001", ["assistant", "tool", "tool"]), ("c00020000", ["assistant", "tool"] * 2)):
        items = [
            {"type": kind, "call_id": id_, "name": "add", "arguments": "{}", "output": "4"}
            for id_ in ("c00010000", other) for kind in ("function_call", "function_call_output")
        ]  # fmt: skip
        assert [message["role"] for message in RESPONSES.read({"input": items}).messages] == roles


@pytest.mark.parametrize("arguments", ['{"a": NaN}', '{"a": -1e999}', '{"a": "\\ud800"}', "{"])
def test_a_cut_reply_with_a_call_says_so_and_has_arguments_that_clients_read(arguments: str) -> None:
    call = ToolCall(id="c00000000", type="function", function={"name": "add", "arguments": arguments})
    message = Message(role="assistant", content="", tool_calls=[call])
    reply = Reply(
        message=message, call_errors=(), finish_reason="length", turn=0, num_prompt_tokens=1, num_tokens=1
    )
    asked = AgentRequest(messages=[], tools=[], max_tokens=None, stream=False, model="policy")
    assert CHAT_COMPLETIONS.body(asked, reply)["choices"][0]["finish_reason"] == "length"
    assert RESPONSES.body(asked, reply)["status"] == "incomplete"
    body = MESSAGES.body(asked, reply)
    assert body["stop_reason"] == "max_tokens" and body["content"][0]["input"] == {"arguments": arguments}


def test_no_two_calls_of_an_episode_have_the_same_id() -> None:
    ids: list[str] = []

    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        for _ in range(2):
            _, body, _ = await post(opened, {**ASK, "tools": [ADD]})
            ids.extend(call["id"] for call in body["choices"][0]["message"]["tool_calls"])

    many = '<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 101
    with_session(agent, many, many, max_tokens=10_000)
    assert len(set(ids)) == 202 and {len(each) for each in ids} == {9}


def test_clients_find_the_model_and_their_own_errors() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        async with client(opened) as llm:
            assert (await llm.models.retrieve("policy")).created == 0
        async with claude(opened) as llm:
            (model,) = [model async for model in llm.models.list()]
            assert (model.type, model.display_name, model.created_at.year) == ("model", "policy", 1970)
            with pytest.raises(anthropic.NotFoundError) as refused:
                await llm.messages.count_tokens(model="policy", messages=[{"role": "user", "content": "hi"}])
        assert refused.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]

    with_session(agent)


def test_the_key_may_be_the_api_key_of_anthropics_client() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        root = opened.base_url.partition("/s/")[0]
        async with anthropic.AsyncAnthropic(base_url=root, api_key=opened.key) as llm:
            assert (await llm.messages.create(**asked)).model == "m"
        async with anthropic.AsyncAnthropic(base_url=root, api_key="other") as llm:
            with pytest.raises(anthropic.AuthenticationError):
                await llm.messages.create(**asked)

    assert with_session(agent, "a").num_turns == 1


def test_a_reply_says_in_each_api_why_it_ended() -> None:
    async def cut(tokens: list[int], max_tokens: int) -> SampledReply:
        text = np.array(TOKENIZER("The lazy dog sleeps.")["input_ids"][:max_tokens], np.int32)
        zeros = np.zeros(len(text), np.int32)
        return SampledReply(tokens=text, logprobs=zeros.astype(np.float32), versions=zeros, finish_reason="length")

    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        async with client(opened) as llm:
            response = await llm.responses.create(model="policy", input="hi", max_output_tokens=2)
            assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]
        asked: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
        async with claude(opened) as llm:
            message = await llm.messages.create(max_tokens=2, **asked)
            assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
            async with llm.messages.stream(max_tokens=9, stop_sequences=["x", "lazy"], **asked) as stream:
                message = await stream.get_final_message()
            assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "lazy")
            assert message.content[0].text == "The "  # type: ignore[union-attr]

    assert with_session(agent, generate=cut).num_turns == 3


RESPONSES_BODY: dict[str, Any] = {"model": "policy", "input": "hi"}
MESSAGES_BODY: dict[str, Any] = {"model": "policy", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
REFUSED: list[tuple[str, dict[str, Any] | None, str]] = [
    *(("chat/completions", change, named) for change, named in (
        ({"n": 2}, "n"), ({"logprobs": True}, "logprobs"), ({"messages": []}, ""), ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "'wizard'"),
        ({"messages": [user("a"), {"role": "tool", "content": "4"}]}, "messages[1]"),
        ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, ""), ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools"), ({"stop": [5]}, "stop"), (None, "JSON"),
        ({"nonsense": 1}, "nonsense"), ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    )),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"tools": [{"type": "web_search", "name": "x"}]}, "web_search"),
    ("responses", {"input": [{"type": "reasoning", "summary": []}]}, "input[0]"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
    ("responses", {"nonsense": 1}, "nonsense"), ("messages", {"container": "c"}, "container"),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0]"),
]
"""(The API, what is wrong with a request, what its refusal names)."""


def test_parameters_with_values_that_ask_for_nothing_are_accepted() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        nothing = {"n": 1, "best_of": 1, "length_penalty": 1.0, "function_call": "auto", "min_tokens": 0, "seed": None}
        assert (await post(opened, {**ASK, **nothing}))[0] == 200

    with_session(agent, "a")


def test_a_request_that_can_not_be_honoured_gets_400_with_its_parameter_and_no_retry() -> None:
    async def agent(endpoint: AgentEndpoint, opened: OpenSession) -> None:
        bodies = {"chat/completions": ASK, "responses": RESPONSES_BODY, "messages": MESSAGES_BODY}
        async with aiohttp.ClientSession() as http:
            for path, change, named in REFUSED:
                data = "{" if change is None else json.dumps(bodies[path] | change)
                async with http.post(f"{opened.base_url}/{path}", data=data) as reply:
                    assert (reply.status, reply.headers["x-should-retry"]) == (400, "false"), change
                    assert named in (await reply.json())["error"]["message"], change
            for method, path, status in (("POST", "/completions", 404), ("GET", "/chat/completions", 405)):
                async with http.request(method, opened.base_url + path, json=ASK) as reply:
                    assert (reply.status, reply.headers["x-should-retry"]) == (status, "false")
        assert (await post(opened, {"messages": [user("x" * 2**24)]}))[0] == 413
        async with client(opened) as llm:
            with pytest.raises(openai.BadRequestError) as refused:
                await llm.responses.create(**RESPONSES_BODY, top_logprobs=3)
            assert refused.value.code == "unsupported"
        async with claude(opened) as llm:
            with pytest.raises(anthropic.BadRequestError) as not_here:
                await llm.messages.create(**MESSAGES_BODY, extra_body={"mcp_servers": [{"url": "x"}]})
            assert not_here.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]

    assert with_session(agent, "a").num_turns == 0
