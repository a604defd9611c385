from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
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
PART = ANYTHING | st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "tool_use", "tool_result", "image"]) | ANYTHING},
    optional={"text": ANYTHING, "name": ANYTHING, "input": ANYTHING, "content": ANYTHING, "id": ANYTHING},
)
MESSAGE = ANYTHING | st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system", "developer", "x"]) | ANYTHING,
        "type": st.sampled_from(["message", "function_call", "function_call_output"]) | ANYTHING,
        "content": ANYTHING | st.lists(PART, max_size=3), "tool_calls": ANYTHING | st.lists(CALL, max_size=2),
        "call_id": ANYTHING, "name": ANYTHING, "arguments": ANYTHING, "output": ANYTHING,
    },
)  # fmt: skip
TOOL = CALL | st.fixed_dictionaries(
    {"name": ANYTHING},
    optional={"type": st.sampled_from(["function", "custom"]) | ANYTHING, "parameters": ANYTHING},
)
OPTIONS = {"tools": ANYTHING | st.lists(TOOL, max_size=2), "system": ANYTHING | st.lists(PART, max_size=2)}
BODIES = {
    CHAT_COMPLETIONS: ("messages", "tools", "max_tokens", "stop", "n", "stream_options", "model", "temperature"),
    RESPONSES: ("input", "tools", "instructions", "max_output_tokens", "tool_choice"),
    MESSAGES: ("messages", "tools", "system", "stop_sequences", "max_tokens", "tool_choice"),
}
"""[API] where it has the messages, and others of its keys."""
ONCE_FAILED: list[Any] = [
    {"messages": [{"role": "user", "tool_calls": True}]}, {"input": [{"type": "function_call"}]},
    {"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, [], None,
]


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


@pytest.mark.parametrize("api", BODIES, ids=["chat completions", "responses", "messages"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_body_gets_a_reply_or_a_refusal_from_the_session(api: Api, data: st.DataObject) -> None:
    key, *others = BODIES[api]
    body = data.draw(st.sampled_from(ONCE_FAILED) | st.fixed_dictionaries(
        {key: ANYTHING | st.lists(MESSAGE, max_size=3)},
        optional={name: OPTIONS.get(name, ANYTHING) for name in others},
    ))
    num_messages = check_reply_or_refusal(api, body)
    assert api is not CHAT_COMPLETIONS or num_messages == 0 or num_messages == len(body[key])


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
    for changed in ([user("a "), told[1]], [user("a"), user("b")]):
        assert prefix_digests(changed, [])[2] != prefix_digests(told, [])[2]


def test_calls_are_compared_by_name_and_arguments() -> None:
    def told(id_: str, arguments: str) -> bytes:
        call: Any = {"id": id_, "type": "function", "function": {"name": "add", "arguments": arguments}}
        return prefix_digests([Message(role="assistant", content="", tool_calls=[call])], [])[1]

    assert told("1", '{"a": 1, "b": 2}') == told("2", '{"b":2,"a":1}') != told("1", '{"a": 1, "b": 3}')
