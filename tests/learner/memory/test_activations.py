"""The memory of passes of unusual models is measured, or said to be unknown."""

from __future__ import annotations

import torch
from transformers import Ernie4_5_MoeConfig

from learner.memory.activations import measure_pass


def test_a_model_with_parameters_that_are_never_trained_is_measured() -> None:
    config = Ernie4_5_MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, max_position_embeddings=128,
    )
    found = measure_pass(config, 64, torch.bfloat16, checkpoints=False, masked=False)
    assert 0 < found.kept < found.peak
