"""How rows are laid out for the attention that transformers has chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    BloomConfig,
    FalconConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    Lfm2Config,
    Llama4TextConfig,
    MptConfig,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from learner.models.attention_probe import attention_gets_positions
from learner.models.policy import layout_of


def layout(config: Any, attention: str) -> Any:
    chosen = config.from_dict(config.to_dict(), attn_implementation=attention)
    return layout_of([SimpleNamespace(config=chosen)])


@pytest.mark.parametrize(
    ("name", "masked", "sparse"),
    [
        ("sdpa", True, False), ("flex_attention", True, True), ("flash_attention_2", False, True),
        ("kernels-community/flash-attn2", False, True), ("kernels-community/vllm-flash-attn3", False, True),
    ],
)
def test_flash_attention_packs_rows_also_as_a_kernel_of_the_hub(name: str, masked: bool, sparse: bool) -> None:
    found = layout(Qwen2Config(hidden_size=896), name)
    assert (found.masked, found.sparse) == (masked, sparse)


def test_rows_are_not_masked_apart_where_layers_see_chunks_or_windows() -> None:
    windows = Qwen2Config(use_sliding_window=True, sliding_window=8)
    for config in (Llama4TextConfig(attention_chunk_size=8192), windows, GPTNeoConfig()):
        assert not layout(config, "sdpa").masked


def test_flash_attention_gives_each_row_of_a_recurrent_model_a_pack_of_its_own() -> None:
    """Flash attention begins anew where positions do; the state of a convolution runs on from row to row."""
    windows = Qwen2Config(use_sliding_window=True, sliding_window=8)
    for config, shares_packs in ((Lfm2Config(), False), (Qwen3NextConfig(), False), (windows, True)):
        found = layout(config, "flash_attention_2")
        assert (found.masked, found.sparse) == (False, shares_packs)


def test_flash_attention_packs_rows_only_of_models_whose_attention_gets_position_ids() -> None:
    """It finds the begins of rows by them; others have no mask and no lengths, so that each row would see the last."""
    for config, shares_packs in (
        (GPTNeoConfig(), False), (GPTJConfig(), False), (GPTBigCodeConfig(), False), (PersimmonConfig(), False),
        (GPT2Config(pad_token_id=0), True), (Qwen3MoeConfig(), True),
    ):  # fmt: skip
        found = layout(config, "flash_attention_2")
        assert (found.masked, found.sparse) == (False, shares_packs)


def test_models_that_look_at_positions_or_draw_layers_are_asked_for_position_ids_too() -> None:
    """The pass that asks is without data, at which neither longer positions nor layers to leave out can be found."""
    long = {
        "rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "factor": 2.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for config in (OPTConfig(), Phi3Config(rope_parameters=long), Qwen2Config(rope_parameters=dynamic)):
        before = config.to_dict()
        assert attention_gets_positions(config), config
        assert config.to_dict() == before


def test_rows_share_no_pack_where_attention_counts_tokens_as_alibi_does() -> None:
    for config, shares_packs in (
        (FalconConfig(alibi=True), False), (MptConfig(), False), (BloomConfig(), False), (FalconConfig(), True),
    ):
        assert layout(config, "sdpa").masked == shares_packs
