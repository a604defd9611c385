from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.errors import ConfigError
from learner.models.tiny_model import character_tokenizer
from rollout_server.episodes.messages import Message, user
from rollout_server.episodes.rendering import TurnRenderer
from tests.rollout_server.episodes.tokenizers import FAMILIES, end_tokens, tokenizer_of

TOOL: Message = {"role": "tool", "content": "42", "tool_call_id": "call_1", "name": "add"}
ADD = {
    "type": "function",
    "function": {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
}


def after(family: str, reply: str, *messages: Message) -> str:
    """The text that is appended to a reply, special tokens included."""
    tokenizer = tokenizer_of(family)
    tokens = tokenizer(reply, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(TurnRenderer(tokenizer, end_tokens(family)).next(tokens, messages)))


@pytest.mark.parametrize(
    ("family", "reply", "message", "expected"),
    [
        ("qwen2_5", "4<|im_end|>", user("sure?"),
         "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen2_5", "4", user("sure?"),
         "<|im_end|>\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen2_5", "4<|endoftext|>", user("sure?"),
         "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", "4<|im_end|>", TOOL,
         "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("llama3_2", "4<|eom_id|>", TOOL,
         '<|start_header_id|>ipython<|end_header_id|>\n\n"42"<|eot_id|>'
         "<|start_header_id|>assistant<|end_header_id|>\n\n"),
        # GLM's end tokens are the heads of the next message: one that names another role must stay.
        ("glm4moe", "4<|user|>", user("sure?"), "\nsure?<|assistant|>"),
        ("glm4moe", "4<|user|>", TOOL, "<|observation|>\n<tool_response>\n42\n</tool_response><|assistant|>"),
    ],
)  # fmt: skip
def test_what_follows_a_reply_is_as_the_template_writes_it(
    family: str, reply: str, message: Message, expected: str
) -> None:
    assert after(family, reply, message) == expected


def test_two_tool_results_share_one_turn() -> None:
    assert after("qwen2_5", "x<|im_end|>", TOOL, TOOL).count("<|im_start|>user") == 1


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.sampled_from(["<|im_", "end|>", "<|im_end|>", "<|eot_id|>", "<|user|>", "x", "<", "|>"])))
def test_no_message_can_write_a_special_token(family: str, parts: list[str]) -> None:
    tokenizer, text = tokenizer_of(family), "".join(parts)
    renderer = TurnRenderer(tokenizer, end_tokens(family))
    special = set(tokenizer.all_special_ids) | set(end_tokens(family))

    def count(tokens: list[int]) -> int:
        return sum(token in special for token in tokens)

    reply = [5, end_tokens(family)[0]]
    for message in (user(text), Message(role="tool", content=text)):
        plain = Message(role=message["role"], content="x")
        assert count(renderer.next(reply, [message])) == count(renderer.next(reply, [plain]))
    call: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "' + text + '"}'}}
    told = [user(text), Message(role="assistant", content="", tool_calls=[call]), TOOL]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
    plain_told = [user("x"), Message(role="assistant", content="", tool_calls=[call]), TOOL]
    assert count(renderer.start(told)) == count(renderer.start(plain_told))


def test_tools_are_described_at_the_start_only() -> None:
    tokenizer = tokenizer_of("qwen2_5")
    renderer = TurnRenderer(tokenizer, end_tokens("qwen2_5"))
    assert '"name": "add"' in tokenizer.decode(renderer.start([user("1+1?")], [ADD]))
    assert renderer.roles == {"user", "tool", "system"}


def test_the_date_in_a_prompt_does_not_depend_on_the_day() -> None:
    tokenizer = tokenizer_of("llama3_2")
    text = tokenizer.decode(TurnRenderer(tokenizer, end_tokens("llama3_2")).start([user("hi")]))
    assert "Today Date: 26 Jul 2024" in text


def test_a_tokenizer_without_template_gets_lines_of_text() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    renderer = TurnRenderer(tokenizer, [tokenizer.eos_token_id])
    reply = tokenizer("4<eos>")["input_ids"]
    assert tokenizer.decode(renderer.start([user("Q: 2+2"), user("A:")])) == "Q: 2+2\nA:"
    assert tokenizer.decode(renderer.next(reply, [user("Q: 3"), user("A:")])) == "\nQ: 3\nA:"
    with pytest.raises(ValueError, match="no chat template"):
        renderer.start([user("hi")], [ADD])


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",  # numbers the messages
        "{% for m in messages %}{{ m.content if m.role == 'user' else '' }}{% endfor %}",  # leaves replies out
        "{{ messages[0].content }}",  # writes the first message only
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_does_not_only_append_is_refused_at_start(template: str) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="only appends"):
        TurnRenderer(tokenizer, [tokenizer.eos_token_id])


def test_a_role_that_can_not_be_appended_is_refused() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content }}|{% endfor %}"
    renderer = TurnRenderer(tokenizer, [tokenizer.eos_token_id])
    assert renderer.roles == {"user"}
    with pytest.raises(ValueError, match="role tool can't be appended"):
        renderer.next([5], [TOOL])


def test_a_message_the_template_refuses_is_a_clear_error() -> None:
    tokenizer = tokenizer_of("llama3_2")
    renderer = TurnRenderer(tokenizer, end_tokens("llama3_2"))
    call: Any = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    two_calls = [user("a"), Message(role="assistant", content="", tool_calls=[call, call]), TOOL]
    with pytest.raises(ValueError, match=r"refuses messages of the roles user, assistant, tool.*single tool-calls"):
        renderer.start(two_calls)


def test_half_a_character_becomes_a_question_mark() -> None:
    assert "\nx?y<|im_end|>" in after("qwen2_5", "4<|im_end|>", user("x\ud800y"))
