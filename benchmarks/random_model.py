"""Makes models with random weights, for benchmarks of speed.

    python -m benchmarks.random_model 1b models/random-1b
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from learner.models.tiny_model import character_tokenizer

SIZES: dict[str, dict[str, Any]] = {
    "1m": {
        "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "3m": {
        "vocab_size": 4096, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "0.1b": {
        "vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 4,
    },
    "135m": {
        "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "1b": {
        "vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 20,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}
"""Qwen2 configurations by size. The output head of 3m has the same share of the work as in a real 0.5 B model. Every
engine has kernels for the heads of 1m, and few of its answers end before the limit: one token of 4096 ends them. 135m
has the shape of SmolLM2-135M.
"""


def save_random_model(size: str, folder: Path) -> None:
    """Save a random model of a size in SIZES, with a tokenizer, as a Hugging Face folder; 1m and 3m are in float32.

    The other sizes are in bfloat16.

    The tokenizer knows only the first hundred tokens, and decodes the others to empty text.
    """
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(Qwen2Config(
            **SIZES[size], max_position_embeddings=4096, tie_word_embeddings=True, eos_token_id=2, pad_token_id=0,
        ))  # fmt: skip
    model.to(torch.float32 if size in ("1m", "3m") else torch.bfloat16)  # type: ignore[arg-type]
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    save_random_model(sys.argv[1], Path(sys.argv[2]))
