"""Makes tiny random models with a character tokenizer, which learn a small task in a minute on one CPU core."""

from __future__ import annotations

import string
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
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

TINY_MODELS: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "tiny-qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "tiny-llama": (LlamaConfig, LlamaForCausalLM),
    "tiny-qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
MAX_POSITIONS = 1024
_SPECIAL = ["<pad>", "<unk>", "<eos>", "<sep>"]
_CHARACTERS = [*string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<sep>{% endif %}"
)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each printable ASCII character and the newline; others are left out.

    It is a byte-level BPE without merges, because transformers loads the tokenizer of every Qwen2 folder as a
    byte-level BPE, whatever the folder says. The chat template ends a prompt with <sep>.
    """
    alphabet = {" ": "Ġ", "\n": "Ċ"}  # byte-level BPE writes space and newline like this
    tokens = [*_SPECIAL, *(alphabet.get(character, character) for character in _CHARACTERS)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>",
        additional_special_tokens=["<sep>"], chat_template=_CHAT_TEMPLATE, clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS, padding_side="left",
    )


def tiny_model(name: str, seed: int) -> PreTrainedModel:
    """Return a float32 model of 0.3 M parameters for `character_tokenizer`, initialised at random from `seed`."""
    sizes: dict[str, Any] = {
        "vocab_size": len(_SPECIAL) + len(_CHARACTERS), "hidden_size": 96, "intermediate_size": 384,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": _SPECIAL.index("<eos>"),
        "pad_token_id": _SPECIAL.index("<pad>"),
    }
    if name == "tiny-qwen3":  # the other two have heads of 24 numbers, for which few kernels are written
        sizes["head_dim"] = 32
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config_class, model_class = TINY_MODELS[name]
        return model_class(config_class(**sizes))
