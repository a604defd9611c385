"""Small tokenizers with merges, the special tokens of model families, and the families' own chat templates."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CORPUS = [
    "The quick brown fox jumps over the lazy dog.\n\n1. It is 42, and it was 17 before.\n",
    '{"name": "add", "arguments": {"a": 17, "b": 25}}\n{"name":"add","arguments":{"a":17,"b":25}}\n',
    "system user assistant tool ipython\n\nYou are a helpful assistant. Today Date: 26 Jul 2024\n",
]
_CHATML = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_LLAMA = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
]
_GLM = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
FAMILIES = {
    "qwen2_5": (_CHATML, ["<tool_call>", "</tool_call>"], ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": (_CHATML, ["<tool_call>", "</tool_call>", "<think>", "</think>"], ["<|im_end|>", "<|endoftext|>"]),
    "llama3_2": (_LLAMA, [], ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"]),
    "glm4moe": (_GLM, ["<think>", "</think>"], ["<|user|>", "<|observation|>", "<|endoftext|>"]),
}
"""Special tokens, further tokens, and the tokens that end a reply, by the name of the template."""


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 600 tokens with the chat template `family` of the trl package."""
    special, further, ends = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        _CORPUS * 20, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in further])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=ends[0],
        bos_token=special[0],
        chat_template=template(family),
        clean_up_tokenization_spaces=False,
    )


def end_tokens(family: str) -> list[int]:
    return list(map(tokenizer_of(family).convert_tokens_to_ids, FAMILIES[family][2]))


def template(name: str) -> str:
    found = importlib.util.find_spec("trl")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the chat templates are those of the trl package")
    return (Path(found.submodule_search_locations[0]) / "chat_templates" / f"{name}.jinja").read_text()
