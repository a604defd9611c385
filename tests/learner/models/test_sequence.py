"""Rows that two ranks split have the logprobs and the gradient of whole rows, with each kernel and exchange."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from async_rl.base.errors import ConfigError
from learner.models.sequence import check_splittable, document_lengths, head_repeats
from tests.kit.forked import start_ranks
from tests.kit.learner.split_ranks import HEADS, rank_main, scored, split_policy

SHAPE = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_HEADS = {name: size for name, size in SHAPE.items() if name != "num_attention_heads"}


@pytest.mark.processes
@pytest.mark.parametrize("kernels", [
    ("sdpa", "flash_attention_2"), pytest.param(("flex_attention",), marks=pytest.mark.nightly)  # it is compiled
])
def test_every_kernel_scores_split_rows_as_whole_ones(kernels: tuple[str, ...], tmp_path: Path) -> None:
    cases = [(kernel, exchange) for kernel in kernels for exchange in HEADS]
    start_ranks(rank_main, 2, 2, str(tmp_path / "store"), str(tmp_path), cases)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for kernel, exchange in cases:
            expected, split = scored(split_policy(exchange), kernel, has_gradient=True), found[kernel, exchange]
            for of_pass, whole in zip(split["scores"], expected["scores"], strict=True):
                torch.testing.assert_close(of_pass, whole, atol=1e-5, rtol=1e-5)
            assert len(split["gradient"]) == (0 if kernel == "flex_attention" else len(expected["gradient"]))
            for name, gradient in split["gradient"].items():
                scale = float(expected["gradient"][name].abs().max())
                torch.testing.assert_close(gradient, expected["gradient"][name], atol=5e-6 * scale, rtol=0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "repeats"),
    [(8, 4, 4, 1), (8, 2, 4, 2), (64, 8, 8, 1), (28, 4, 4, 1), (28, 4, 8, 0), (9, 3, 2, 0), (6, 3, 2, 2), (4, 4, 3, 0)],
)
def test_heads_are_exchanged_where_each_rank_gets_as_many(heads: int, kv_heads: int, ranks: int, repeats: int) -> None:
    assert head_repeats(heads, kv_heads, ranks) == repeats


def test_a_slice_needs_the_keys_from_the_begin_of_its_first_document_to_its_own_end() -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 4, 0]])
    whole, keys = document_lengths(positions, 0, 12)
    assert whole["cu_seq_lens_q"].tolist() == whole["cu_seq_lens_k"].tolist() == [0, 4, 6, 11, 12]
    assert (whole["max_length_q"], keys) == (5, slice(None))
    part, keys = document_lengths(positions, 3, 9)
    assert part["cu_seq_lens_q"].tolist() == [0, 1, 3, 6]
    assert part["cu_seq_lens_k"].tolist() == [0, 4, 6, 9]
    assert (part["max_length_q"], part["max_length_k"], keys) == (3, 4, slice(0, 9))


def odd_embeddings() -> PreTrainedModel:
    class Scaled(nn.Embedding):
        pass

    lm = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    lm.set_input_embeddings(Scaled(7, 8))
    return lm


@pytest.mark.parametrize(
    ("lm", "reason"),
    [
        (MistralForCausalLM(MistralConfig(sliding_window=4, **SHAPE)), "sliding_window = 4"),
        (
            Qwen3ForCausalLM(Qwen3Config(layer_types=["full_attention", "chunked_attention"], **SHAPE)),
            "chunked_attention",
        ),
        (BloomForCausalLM(BloomConfig(n_head=2, **NO_HEADS)), "attention"),
        (odd_embeddings(), "Scaled"),
        (DogeForCausalLM(DogeConfig(**SHAPE)), "keep_window_size = 2048"),
        (
            Qwen3NextForCausalLM(Qwen3NextConfig(layer_types=["linear_attention", "full_attention"], **SHAPE)),
            "linear_conv_kernel_dim = 4",
        ),
        (Lfm2ForCausalLM(Lfm2Config(layer_types=["conv", "full_attention"], **SHAPE)), "conv_L_cache = 3"),
        (RwkvForCausalLM(RwkvConfig(**NO_HEADS)), "attention"),
    ],
    ids=["window", "layer type", "own attention", "own embeddings", "own window", "Qwen3-Next", "LFM2", "RWKV"],
)
def test_a_model_whose_rows_cannot_be_split_is_refused(lm: PreTrainedModel, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"sequence_parallel .* model\.path x.*{reason}"):
        check_splittable(lm, "model.path", "x")
    check_splittable(Qwen3ForCausalLM(Qwen3Config(**SHAPE)), "model.path", "x")
