"""How rows are laid out for the attention that transformers has chosen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from transformers import Qwen2Config

from learner.models.policy import layout_of


@pytest.mark.parametrize(
    ("name", "masked", "sparse"),
    [
        ("sdpa", True, False), ("flex_attention", True, True), ("flash_attention_2", False, True),
        ("kernels-community/flash-attn2", False, True), ("kernels-community/vllm-flash-attn3", False, True),
    ],
)
def test_flash_attention_packs_rows_also_as_a_kernel_of_the_hub(name: str, masked: bool, sparse: bool) -> None:
    config = Qwen2Config(hidden_size=896)
    config._attn_implementation_internal = name
    layout = layout_of([SimpleNamespace(config=config)])
    assert (layout.masked, layout.sparse) == (masked, sparse)
