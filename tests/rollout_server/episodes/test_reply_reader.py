from __future__ import annotations

import asyncio
from typing import Any

import pytest

from async_rl.base.errors import ConfigError
from rollout_server.episodes.conversation.reply_reader import (
    JsonParser,
    Parsed,
    ReplyReader,
    ServerParser,
    json_calls,
    open_parser,
)
from tests.kit.tokenizers import end_tokens, template, tokenizer_of

ADD = ("add", '{"a": 1}')
JSON, PARAMETERS = (f'{{"name": "add", "{key}": {{"a": 1}}}}' for key in ("arguments", "parameters"))
CALL = f"<tool_call>{JSON}</tool_call>"
MARK = ("ask", '{"q": "what is </think>?"}')
JSON_MARK = f'{{"name": "{MARK[0]}", "arguments": {MARK[1]}}}'
ASK_MARK = f"<tool_call>{JSON_MARK}</tool_call>"
SCHEMA = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("hermes", "It is 4.", Parsed("It is 4.")),
    ("hermes", f"so:\n<tool_call>\n{JSON}\n</tool_call>", Parsed("so:", (ADD,))),
    ("hermes", CALL * 2, Parsed("", (ADD, ADD))),
    ("hermes", f"<tool_call>{JSON}", Parsed("", (ADD,))),  # the end is missing
    ("hermes", f"<think>as {CALL} or", Parsed(f"<think>as {CALL} or")),  # the thinking was never closed
    ("hermes", f"<think>a</think>so <think> is closed:{CALL}", Parsed("<think>a</think>so <think> is closed:", (ADD,))),
    ("hermes", f"the mark <think> is missing:{CALL}", Parsed("the mark <think> is missing:", (ADD,))),
    ("hermes", f"{CALL}<think>as {CALL}</think>{CALL}", Parsed("", (ADD, ADD))),
    ("hermes", f"as {CALL} or</think>{CALL}", Parsed(f"as {CALL} or</think>", (ADD,))),  # the prompt has the <think>
    ("hermes", f"<think>a</think>so:{ASK_MARK}{CALL}", Parsed("<think>a</think>so:", (MARK, ADD))),
    ("llama3", "The answer is {5}.", Parsed("The answer is {5}.")),
    ("llama3", f"<|python_tag|>{PARAMETERS}", Parsed("", (ADD,))),
    ("llama3", f"{PARAMETERS}; {PARAMETERS}", Parsed("", (ADD, ADD))),
    ("llama3", f"<think>{JSON} or", Parsed(f"<think>{JSON} or")),
    ("llama3", f"{{or</think>{JSON}", Parsed("{or</think>", (ADD,))),
    ("llama3", f"<think>a</think>{JSON_MARK}; {JSON}", Parsed("<think>a</think>", (MARK, ADD))),
    ("llama3", '{"name": "add", "parameters": {"a": "1; 2"}} ;\n{"name": "add", "parameters": {"a": ";"}}',
     Parsed("", (("add", '{"a": "1; 2"}'), ("add", '{"a": ";"}')))),
])  # fmt: skip
def test_calls_are_read_outside_of_the_thinking(name: str, text: str, expected: Parsed) -> None:
    assert json_calls(text, name) == expected


@pytest.mark.parametrize(
    "call",
    ["{", "[]", '{"name": 5, "arguments": {}}', '{"name": "add"}', '{"name": "add", "arguments": "x"}'],
)  # fmt: skip
def test_a_malformed_call_is_an_error_and_stays_in_the_text(call: str) -> None:
    text = f"<tool_call>{call}</tool_call>"
    parsed = json_calls(text, "hermes")
    assert parsed.content == text and not parsed.calls
    (error,) = parsed.errors
    assert repr(call) in error
    mixed = json_calls(text + CALL, "hermes")  # a good call beside it is kept
    assert mixed.calls == (ADD,) and len(mixed.errors) == 1 and mixed.content == call


LONG = 100_000
"""Characters of a reply which nobody would wait for if its reading took the square of them."""


@pytest.mark.parametrize("name", ["hermes", "llama3"])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>a" + " " * LONG + "b", "<|python_tag|>" + " " * LONG + "b",
        '{"name": "f", "parameters": {}}' + " ;" * LONG, "<tool_call>" * (LONG // 10), "</think" * (LONG // 10),
        "<tool_call>{}</tool_call>" * (LONG // 100), "<think>" * (LONG // 10), "</think>" * (LONG // 10),
        "<tool_call></think>" * (LONG // 10), "<think></think><tool_call>" * (LONG // 10), "{</think>" * (LONG // 10),
        '{"":"","<think></think>' * (LONG // 10), "</think>" + "\n" * LONG + "</think>",
        "<tool_call>" + "[" * LONG + "]" * LONG, '{"a":' + "[" * LONG + "]" * LONG,
    ],
    ids=range(15),
)  # fmt: skip
def test_a_degenerate_reply_is_read_in_the_time_of_its_length(name: str, text: str) -> None:
    assert not json_calls(text, name).calls or text.startswith('{"name"')


@pytest.mark.parametrize("family", ["qwen2_5", "llama3_2"])
def test_a_reply_is_read_without_its_end(family: str) -> None:
    tokenizer, ends = tokenizer_of(family), end_tokens(family)
    reader = ReplyReader(tokenizer, ends, open_parser("", tokenizer.chat_template, "", {}))
    text = '{"name": "add", "parameters": {"a": 1}}'
    text = f"<tool_call>{text}</tool_call>" if family == "qwen2_5" else f"<|python_tag|>{text}"
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], ends[1]]
    message = asyncio.run(reader.read(tokens, [SCHEMA])).message
    assert message["content"] == "" and message["tool_calls"][0]["function"] == {"name": "add", "arguments": ADD[1]}
    without = asyncio.run(reader.read(tokens, [])).message
    assert "tool_calls" not in without and "parameters" in without["content"] and "<|" not in without["content"]


@pytest.mark.parametrize(
    ("name", "family", "found"),
    [("", "qwen2_5", "hermes"), ("", "qwen3", "hermes"), ("", "llama3_2", "llama3"), ("qwen25", "glm4moe", "hermes")],
)
def test_the_format_of_calls_is_told_from_the_template(name: str, family: str, found: str) -> None:
    assert open_parser(name, template(family), "", {}) == JsonParser(found)


def test_an_unknown_format_is_refused_unless_the_server_reads_it() -> None:
    for name, url in (("", "http://127.0.0.1:1"), ("glm45", "")):
        with pytest.raises(ConfigError, match=rf"rollout\.tool_parser.*'{name}'" if name else r"rollout\.tool_parser"):
            open_parser(name, template("glm4moe"), url, {})
    key = {"Authorization": "Bearer k"}
    asked = ServerParser("http://h:1", "glm45", tuple(key.items()))
    assert open_parser("glm45", template("glm4moe"), "http://h:1", key) == asked


def test_a_parser_of_the_users_that_can_not_be_loaded_is_refused() -> None:
    for name in ("no.such:thing", f"{__name__}:tokenizer_of", f"{__name__}:LONG"):
        with pytest.raises(ConfigError, match=rf"^rollout\.tool_parser '{name}'"):
            open_parser(name, template("qwen2_5"), "", {})


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def parsed(*values: Any) -> Parsed:
    return Parsed(*values)


def reader_of(result: Any, is_async: bool) -> tuple[ReplyReader, list[int]]:
    """A reader with a parser that returns or raises `result`, and the tokens of a reply."""

    def parse(text: str, tools: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    async def parse_later(text: str, tools: Any) -> Any:
        return parse(text, tools)

    tokenizer = tokenizer_of("qwen2_5")
    reader = ReplyReader(tokenizer, end_tokens("qwen2_5"), parse_later if is_async else parse)
    return reader, tokenizer("It is 4.")["input_ids"]


@pytest.mark.parametrize(("result", "named"), [
    (SilentError(), "SilentError"), ({"calls": []}, "TypeError"), (parsed(4), "content"),
    (parsed("", (("add", {"a": 1}),)), "calls"), (parsed("", (), "bad"), "errors"),
], ids=range(5))
@pytest.mark.parametrize("is_async", [False, True])
def test_a_parser_of_the_users_that_fails_is_an_error_that_the_model_reads(
    result: Any, named: str, is_async: bool
) -> None:
    reader, tokens = reader_of(result, is_async)
    for _ in range(2):
        read = asyncio.run(reader.read(tokens, [SCHEMA]))
        assert read.message == {"role": "assistant", "content": "It is 4."}
        (error,) = read.errors
        assert named in error
    (note,) = reader.notes
    assert note.startswith("rollout.tool_parser ") and named in note


@pytest.mark.parametrize("is_async", [False, True])
def test_a_parser_of_the_users_may_be_plain_give_lists_and_leave_the_content_out(is_async: bool) -> None:
    reader, tokens = reader_of(parsed(None, [["add", "{}"]], ["half a call"]), is_async)
    read = asyncio.run(reader.read(tokens, [SCHEMA]))
    assert read.message["content"] == "" and read.message["tool_calls"][0]["function"]["name"] == "add"
    assert (read.errors, reader.notes) == (("half a call",), [])
