"""Makes tiny random models with a character tokenizer, which learn a small task in a minute on one CPU core."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

MAX_POSITIONS = 1024
_SPECIAL = ["<pad>", "<unk>", "<eos>", "<sep>"]
_CHARACTERS = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<sep>{% endif %}"
)

_CHAT_SPECIAL = ["<|endoftext|>", "<unk>", "<|im_end|>", "<|im_start|>"]
"""Padding, unknown, end of a reply, start of a reply: in the same order as `_SPECIAL`."""
_HERMES_PARTS = [
    "<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
    '{"name": "', '", "arguments": {"', '": "', '"}}', '{"type": "function", "function": {"name": "',
    '", "description": "', '", "parameters": {"type": "object", "properties": {"', '": {"type": "', '"}, "',
    '"}}, "required": ["', '"]}}}', "system\n", "user\n", "assistant\n",
]  # fmt: skip
"""The texts that tools, calls and results have in common. Each is one token, so that an episode with a tool has 150
tokens and not 500."""
_HERMES_TEMPLATE = (
    "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
    "{%- if system or tools %}{{ '<|im_start|>system\n' + system }}"
    "{%- if tools %}{{ ('\n\n' if system else '') + '<tools>' }}"
    "{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools>' }}{% endif %}"
    "{{- '<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{- '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- elif not (loop.first and message['role'] == 'system') %}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '\n' if message['content'] or not loop.first else '' }}"
    "{{- '<tool_call>\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{- (call['function']['arguments'] | tojson) + '}\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of Hermes and Qwen2.5, without the sentences that explain tools to a model that reads English."""


class TinyModel(NamedTuple):
    """A kind of tiny model: its transformers classes, and the function that makes its tokenizer."""

    config: type[PretrainedConfig]
    model: type[PreTrainedModel]
    tokenizer: Callable[[], PreTrainedTokenizerFast]


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each printable ASCII character and the newline. It skips other characters.

    The chat template ends a prompt with <sep>. It shows neither tools nor roles.
    """
    return _tokenizer(_SPECIAL, (), _CHAT_TEMPLATE)


def tool_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer like `character_tokenizer` with the chat template of Hermes: it shows roles and tools."""
    return _tokenizer(_CHAT_SPECIAL, _HERMES_PARTS, _HERMES_TEMPLATE)


def _tokenizer(special: Sequence[str], parts: Sequence[str], chat_template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with tokens for the special texts, the characters and the `parts`.

    It is a byte-level BPE without merges, because transformers loads the tokenizer of every Qwen2 folder as a
    byte-level BPE, whatever the folder says.

    Args:
        special: padding, unknown, end of a reply, start of a reply.
    """
    alphabet = {" ": "Ġ", "\n": "Ċ"}  # byte-level BPE writes space and newline like this
    tokens = [*special, *(alphabet.get(character, character) for character in _CHARACTERS)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(part, special=False, normalized=False) for part in parts])
    pad, unknown, end, start = special
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=unknown, eos_token=end,
        additional_special_tokens=[start], chat_template=chat_template, clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS, padding_side="left",
    )


TINY_MODELS = {
    "tiny-qwen2": TinyModel(Qwen2Config, Qwen2ForCausalLM, character_tokenizer),
    "tiny-llama": TinyModel(LlamaConfig, LlamaForCausalLM, character_tokenizer),
    "tiny-qwen3": TinyModel(Qwen3Config, Qwen3ForCausalLM, character_tokenizer),
    "tiny-qwen3-tools": TinyModel(Qwen3Config, Qwen3ForCausalLM, tool_tokenizer),
}


def tiny_model(name: str, seed: int) -> PreTrainedModel:
    """Return a random float32 model of 0.3 M parameters, of the kind TINY_MODELS[name], with weights from `seed`."""
    kind = TINY_MODELS[name]
    tokenizer = kind.tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 384,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }
    if kind.config is Qwen3Config:  # the other two have heads of 24 numbers, for which few kernels are written
        sizes["head_dim"] = 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return kind.model(kind.config(**sizes))
