"""A tiny mixture-of-experts model, of which every token uses every expert: one that is not updated shows at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from learner.models.tiny_model import MAX_POSITIONS, character_tokenizer

EXPERTS = 4


def moe_model(seed: int, sharpness: float = 8, **sizes: Any) -> PreTrainedModel:
    """A Qwen3-MoE of 0.1 M parameters, or of other `sizes`, with decided opinions about the next token.

    Its matrices are `sharpness` times as large as transformers makes them.
    """
    tokenizer = character_tokenizer()
    small = {
        "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 32,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
            **small | sizes, vocab_size=len(tokenizer), max_position_embeddings=MAX_POSITIONS, norm_topk_prob=True,
            bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(sharpness)
    return model


def save_moe(folder: Path, seed: int = 0, **sizes: Any) -> Path:
    moe_model(seed, **sizes).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder
