"""Tiny models, written as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from learner.models.tiny_model import TINY_MODELS, character_tokenizer, tiny_model
from tests.kit.tokenizers import end_tokens, tokenizer_of

VOCAB = 23
"""The number of tokens of a bare model."""


def save_tiny_model(name: str, folder: Path, seed: int) -> None:
    """Model and tokenizer as a Hugging Face folder."""
    tiny_model(name, seed).save_pretrained(folder)
    TINY_MODELS[name].tokenizer().save_pretrained(folder)


def save_tool_model(folder: Path) -> None:
    """A tiny untrained model whose chat template is that of Qwen2.5, which knows tools."""
    tokenizer, ends = tokenizer_of("qwen2_5"), end_tokens("qwen2_5")
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=ends[0], pad_token_id=ends[-1],
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[-1])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def sharp_model(name: str, seed: int) -> PreTrainedModel:
    """A tiny model with eight times the initial weights. Without that its tokens would be almost equally likely."""
    model = tiny_model(name, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def save_sharp_model(folder: Path, name: str = "tiny-qwen2", seed: int = 0) -> Path:
    sharp_model(name, seed).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def load_model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

def save_bare_model(path: Path, is_tied: bool = True, hidden_size: int = 16) -> Path:
    """A Qwen2 of VOCAB tokens and four heads without a tokenizer, for tests whose tokens mean nothing."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB, hidden_size=hidden_size, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=is_tied, initializer_range=0.3,
        bos_token_id=None, eos_token_id=2, pad_token_id=0,
    )).save_pretrained(path)
    return path


def save_bare_reward_model(path: Path, vocab: int = VOCAB, **changes: Any) -> Path:
    """A model with a head of one number, of the size of a bare model."""
    torch.manual_seed(3)
    shape = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 1,
        "num_key_value_heads": 2, "initializer_range": 0.5, "pad_token_id": 2, "eos_token_id": 2, "bos_token_id": None,
    }  # fmt: skip
    Qwen2ForSequenceClassification(Qwen2Config(vocab_size=vocab, **shape | changes)).save_pretrained(path)
    return path
