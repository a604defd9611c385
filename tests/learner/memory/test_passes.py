"""The memory of passes of unusual models is measured, or said to be unknown."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Ernie4_5_MoeConfig, GptOssConfig, GptOssForCausalLM

from learner.memory.memory_plan import RankMemoryEstimate
from learner.memory.passes import measure_pass
from tests.kit.configs import make_config

pytestmark = pytest.mark.processes  # together they compute for long


def test_a_model_with_parameters_that_are_never_trained_is_measured() -> None:
    config = Ernie4_5_MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, max_position_embeddings=128,
    )
    found = measure_pass(config, 64, torch.bfloat16, checkpoints=False, masked=False)
    assert 0 < found.kept < found.peak


def test_a_model_without_sdpa_has_its_sizes_and_its_activations_are_not_computed(tmp_path: Path) -> None:
    lm = GptOssForCausalLM(GptOssConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2,
    ))  # fmt: skip
    lm.save_pretrained(tmp_path)
    estimate = RankMemoryEstimate(make_config(tmp_path, model={"attn_implementation": "flex_attention"}), "cpu")
    assert estimate.networks[0].has.all == lm.num_parameters()
    with pytest.raises(NotImplementedError, match="gpt_oss"):
        estimate.rank_memory(checkpoints=False)
