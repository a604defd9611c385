"""A tiny untrained model whose chat template is that of Qwen2.5, which knows tools."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from tests.kit.tokenizers import end_tokens, tokenizer_of


def save_tool_model(folder: Path) -> None:
    """Write model and tokenizer as a Hugging Face folder."""
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
