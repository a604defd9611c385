from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout_server.episodes.conversation.chat_messages import Message, plain_messages, prefix_digests, user
from rollout_server.episodes.conversation.reply_reader import json_calls
from rollout_server.episodes.conversation.session import EpisodeOver
from rollout_server.episodes.endpoint.chat_completions import CHAT_COMPLETIONS
from rollout_server.episodes.endpoint.messages import MESSAGES
from rollout_server.episodes.endpoint.request import Api, RequestRefusedError
from rollout_server.episodes.endpoint.responses import RESPONSES
from tests.kit.engines.fakes import completion
from tests.kit.episodes.sessions import session_of
from tests.kit.tokenizers import end_tokens, tokenizer_of

pytestmark = pytest.mark.processes  # together they compute for long

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CALL = st.fixed_dictionaries(
    {},
    optional={"id": ANYTHING, "function": ANYTHING | st.fixed_dictionaries({"name": ANYTHING, "arguments": ANYTHING})},
)
MESSAGE = ANYTHING | st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"]) | ANYTHING},
    optional={"content": ANYTHING, "tool_calls": ANYTHING | st.lists(CALL, max_size=2), "name": ANYTHING},
)
OPTIONS = {
    "tools": ANYTHING | st.lists(CALL, max_size=2), "max_tokens": ANYTHING, "stop": ANYTHING, "n": ANYTHING,
    "stream_options": ANYTHING, "model": ANYTHING, "temperature": ANYTHING,
}  # fmt: skip
BODY = ANYTHING | st.fixed_dictionaries({"messages": ANYTHING | st.lists(MESSAGE, max_size=3)}, optional=OPTIONS)
PART = ANYTHING | st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "tool_use", "tool_result", "image"]) | ANYTHING},
    optional={"text": ANYTHING, "name": ANYTHING, "input": ANYTHING, "content": ANYTHING, "id": ANYTHING},
)
ITEM = MESSAGE | st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output"]) | ANYTHING},
    optional={
        "role": st.sampled_from(["user", "assistant", "x"]), "content": ANYTHING | st.lists(PART, max_size=3),
        "call_id": ANYTHING, "name": ANYTHING, "arguments": ANYTHING, "output": ANYTHING,
    },
)  # fmt: skip
TOOL = ANYTHING | st.fixed_dictionaries(
    {"name": ANYTHING},
    optional={"type": st.sampled_from(["function", "custom"]) | ANYTHING, "parameters": ANYTHING},
)
OTHER_OPTIONS = {
    "tools": ANYTHING | st.lists(TOOL, max_size=2), "system": ANYTHING | st.lists(PART, max_size=2),
    "instructions": ANYTHING, "max_output_tokens": ANYTHING, "stop_sequences": ANYTHING, "tool_choice": ANYTHING,
}  # fmt: skip
ITEMS = ANYTHING | st.lists(ITEM, max_size=3)
OTHER_BODY = st.fixed_dictionaries({}, optional={"input": ITEMS, "messages": ITEMS, **OTHER_OPTIONS})


def check_reply_or_refusal(api: Api, body: Any) -> int:
    """Let a session reply to a body, and return the number of its messages; 0 if the API has refused it."""
    try:
        request = api.read(body)
    except RequestRefusedError as refused:
        assert refused.status == 400 and str(refused)
        return 0
    json.dumps(request.messages)

    async def generate(tokens: list[int], max_tokens: int) -> Any:
        return completion([5])

    session = session_of(generate, tokenizer_of("qwen2_5"), end_tokens("qwen2_5"))
    try:
        reply = asyncio.run(session.reply(request.messages, request.tools, stop=request.stop))
    except (ValueError, EpisodeOver) as refused:
        assert str(refused) and session.num_turns == 0
    else:
        assert reply.message["content"] and session.num_turns == 1
        assert json.dumps(api.body(request, reply)) and list(api.events(request, reply))
    return len(request.messages)


@settings(max_examples=200, deadline=None)
@given(body=BODY)
@example(body={"messages": [{"role": "user", "tool_calls": True}]})
def test_any_body_gets_a_reply_or_a_refusal_from_the_session(body: Any) -> None:
    num_messages = check_reply_or_refusal(CHAT_COMPLETIONS, body)
    assert num_messages == 0 or num_messages == len(body["messages"])


@pytest.mark.parametrize("api", [RESPONSES, MESSAGES], ids=["responses", "messages"])
@settings(max_examples=200, deadline=None)
@given(body=OTHER_BODY)
@example(body={"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]})
@example(body={"input": [{"type": "function_call"}]})
def test_any_body_of_the_other_apis_gets_a_reply_or_a_refusal(api: Api, body: Any) -> None:
    check_reply_or_refusal(api, body)


@settings(max_examples=100, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", '"f"', "[", "</think>", ";"])
        | st.text(max_size=4)
    ),
    name=st.sampled_from(["hermes", "llama3"]),
)  # fmt: skip
def test_any_text_is_read_without_an_error(parts: list[str], name: str) -> None:
    text = "".join(parts)
    parsed = json_calls(text, name)
    assert parsed.calls or parsed.content == text


@pytest.mark.parametrize(
    "other",
    [
        [user("a"), {"role": "assistant", "content": "b", "tool_calls": [], "name": "bot"}],
        [user("a"), {"role": "assistant", "content": [{"type": "text", "text": " b\n"}], "reasoning_content": "hm"}],
    ],
)
def test_tellings_of_one_conversation_have_one_digest(other: list[Any]) -> None:
    told: list[Message] = [user("a"), {"role": "assistant", "content": "b"}]
    assert prefix_digests(plain_messages(other), []) == prefix_digests(told, [])


@pytest.mark.parametrize(
    "other", [[user("a "), {"role": "assistant", "content": "b"}], [user("a"), {"role": "user", "content": "b"}]]
)
def test_other_conversations_have_other_digests(other: list[Message]) -> None:
    told: list[Message] = [user("a"), {"role": "assistant", "content": "b"}]
    assert prefix_digests(other, [])[2] != prefix_digests(told, [])[2]


def test_calls_are_compared_by_name_and_arguments() -> None:
    def told(id_: str, arguments: str) -> bytes:
        call: Any = {"id": id_, "type": "function", "function": {"name": "add", "arguments": arguments}}
        return prefix_digests([Message(role="assistant", content="", tool_calls=[call])], [])[1]

    assert told("1", '{"a": 1, "b": 2}') == told("2", '{"b":2,"a":1}') != told("1", '{"a": 1, "b": 3}')
