from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from async_rl.base.errors import ConfigError
from learner.models.tiny_model import character_tokenizer
from rollout_server.episodes.conversation.chat_messages import Message, user
from rollout_server.episodes.conversation.rendering import TurnRenderer
from tests.kit.tokenizers import FAMILIES, end_tokens, tokenizer_of

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
    if message is TOOL and family == "qwen3":  # several results share one turn
        assert after(family, reply, TOOL, TOOL).count("<|im_start|>user") == 1


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
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


def marked_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes whose roles are marked by added tokens that are not special, like those of DeepSeek's."""
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    plain = ["<User>", "<Assistant>", "<call>", "<think>", "user", "\n", "<unused>"]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    made.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<Assistant>{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}{% endfor %}<end>"
        "{% else %}<User>{{ '[tool] ' if m.role == 'tool' else '' }}{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<Assistant><think>{% endif %}"
    )
    return made


EVERY_MARK = "a<User>b<Assistant>c<call>d<think>e<end>f<unused>g user\nh"


@pytest.mark.parametrize(
    ("role", "shown"),
    [
        ("user", "a b c<call>d<think>e f<unused>g user\nh"),
        ("system", "a b c<call>d<think>e f<unused>g user\nh"),
        ("tool", "[tool] a b c d e f<unused>g user\nh"),
    ],
)
def test_no_message_can_write_a_role_marker_that_is_no_special_token(role: str, shown: str) -> None:
    tokenizer = marked_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<end>")
    renderer = TurnRenderer(tokenizer, [end])
    message = Message(role=role, content=EVERY_MARK)
    expected = f"<User>{shown}\n<Assistant><think>"
    assert tokenizer.decode(renderer.next([5, end], [message])) == expected
    assert tokenizer.decode(renderer.start([message])) == expected


def test_what_template_and_model_write_keeps_its_markers() -> None:
    tokenizer = marked_tokenizer()
    renderer = TurnRenderer(tokenizer, [tokenizer.convert_tokens_to_ids("<end>")])
    call: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    told = [user("a"), Message(role="assistant", content="<think>b<call>", tool_calls=[call]), TOOL]
    text = tokenizer.decode(renderer.start(told))
    assert text == "<User>a\n<Assistant><think>b<call><call>f<end><User>[tool] 42\n<Assistant><think>"


def test_a_tokenizer_without_template_gets_lines_of_text() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    renderer = TurnRenderer(tokenizer, [tokenizer.eos_token_id])
    reply = tokenizer("4<eos>")["input_ids"]
    assert tokenizer.decode(renderer.start([user("Q: 2+2"), user("A:")])) == "Q: 2+2\nA:"
    assert tokenizer.decode(renderer.next(reply, [user("Q: 3"), user("A:")])) == "\nQ: 3\nA:"
    with pytest.raises(ValueError):
        renderer.start([user("hi")], [ADD])


@pytest.mark.parametrize("template", [
    "{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}",  # numbers the messages
    "{% for m in messages %}{{ m.content if m.role == 'user' else '' }}{% endfor %}",  # leaves replies out
    "{{ messages[0].content }}", "{{ raise_exception('no') }}",
])  # fmt: skip
def test_a_template_that_does_not_only_append_is_refused_at_start(template: str) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match="template"):
        TurnRenderer(tokenizer, [tokenizer.eos_token_id])
