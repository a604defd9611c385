"""Packing, checkpointed blocks and compiled blocks make a step cheaper and change none of its numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from async_rl.base.config import LearnerConfig, ModelConfig
from async_rl.base.types import Batch
from learner.algorithms.advantages import batch_advantages
from learner.loop.updater import Updater
from learner.models.policy import full_parameters
from learner.packing import Layout, MicroBatch
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.learner.updates import batch_logprobs, gradients
from tests.kit.models import save_bare_model

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")
BATCH = make_batch(groups=6)


def open_updater(path: Path, attention: Any = "sdpa", max_tokens: int = 4096, **learner: Any) -> Updater:
    model = ModelConfig(path=str(path), attn_implementation=attention)
    learner = {"prompts_per_step": 6, "lr": 1e-3, "max_tokens_per_microbatch": max_tokens} | learner
    return Updater(learner_config(path, model=model, learner=LearnerConfig(**learner)), CPU)


def check_logprobs(updater: Updater, path: Path, batch: Batch) -> tuple[MicroBatch, ...]:
    """Every answer of the batch scored once, as transformers scores it alone; returns the micro-batches."""
    expected = batch_logprobs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), batch)
    (minibatch,) = updater.pack(batch, batch_advantages(updater.config, batch))
    rows = []
    for micro in minibatch.micro_batches:
        with torch.no_grad():
            logprobs = updater.policy(micro.inputs)[0].split(micro.response.lengths)
        for row, ours in zip(micro.rows, logprobs, strict=True):
            torch.testing.assert_close(ours, expected[row], atol=1e-5, rtol=1e-5)
            rows.append(row)
    assert sorted(rows) == list(expected)
    return minibatch.micro_batches


FLEX = pytest.mark.nightly  # compiles its kernel for each shape


@pytest.mark.parametrize(
    ("attention", "max_tokens", "seed"),
    [
        ("sdpa", 4096, 0),
        ("sdpa", 60, 0),
        ("sdpa", 60, 1),
        ("eager", 60, 0),
        pytest.param("flex_attention", 4096, 0, marks=FLEX),
        pytest.param("flex_attention", 60, 1, marks=FLEX),
    ],
)
def test_packed_logprobs_are_those_of_transformers_on_each_sequence_alone(
    tiny_model_path: Path, one_rank: None, attention: str, max_tokens: int, seed: int
) -> None:
    updater = open_updater(tiny_model_path, attention, max_tokens)
    micro_batches = check_logprobs(updater, tiny_model_path, make_batch(seed, groups=6))
    assert (len(micro_batches) == 1) == (max_tokens == 4096)
    prompts_in_a_row = [
        len(set(roots[roots >= 0].tolist()))
        for micro in micro_batches
        if micro.inputs.segments is not None
        for roots in micro.inputs.segments[1]
    ]
    assert max(prompts_in_a_row) > 1
    if (attention, max_tokens) == ("flex_attention", 4096):
        assert prompts_in_a_row == [6]
        assert (micro_batches[0].inputs.segments[0] >= 0).all()  # type: ignore[index]


def test_rows_without_a_mask_are_separated_by_their_positions(
    tiny_model_path: Path, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of flash_attention_2, which needs a GPU: sdpa without a mask is parted by positions as well."""
    updater = open_updater(tiny_model_path)
    monkeypatch.setattr(updater, "_layout", Layout(masked=False, sparse=True))
    monkeypatch.setattr("learner.models.network.MASKED", ())
    (micro,) = check_logprobs(updater, tiny_model_path, make_batch(groups=6))
    assert micro.inputs.positions is not None and micro.inputs.tokens.shape[0] == 1
    assert (micro.inputs.positions == 0).sum() == 6 * 4


def test_checkpointed_blocks_are_computed_twice_and_give_the_same_gradient(
    tiny_model_path: Path, one_rank: None
) -> None:
    calls: list[str] = []
    plain, checkpointed = open_updater(tiny_model_path), open_updater(tiny_model_path, gradient_checkpointing=True)
    for name, updater in (("plain", plain), ("checkpointed", checkpointed)):
        for layer in updater.policy.lm.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    expected = gradients(plain, BATCH)
    for name, gradient in gradients(checkpointed, BATCH).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-7, rtol=1e-5)
    assert calls == ["plain"] * 2 + ["checkpointed"] * 4


@pytest.mark.nightly
def test_compiled_blocks_give_the_same_gradient_and_names(tiny_model_path: Path, one_rank: None) -> None:
    expected = gradients(open_updater(tiny_model_path), BATCH)
    compiled = open_updater(tiny_model_path, compile=True, gradient_checkpointing=True)
    for name, gradient in gradients(compiled, BATCH).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)
    assert {name for name, _ in full_parameters(compiled.policy, torch.float32)} == set(expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flex_attention_on_a_gpu_gives_the_gradient_of_sdpa(tmp_path: Path, dtype: Any) -> None:
    """Its kernel is written for heads of 16 numbers and more."""
    path = save_bare_model(tmp_path, hidden_size=64)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for attention in ("sdpa", "flex_attention"):
            model = ModelConfig(path=str(path), attn_implementation=attention, dtype=dtype)  # type: ignore[arg-type]
            found.append(gradients(Updater(learner_config(path, model=model), torch.device("cuda")), BATCH))
        for name, gradient in found[1].items():
            tolerance = 1e-5 if dtype == "float32" else 0.05
            torch.testing.assert_close(gradient, found[0][name], atol=tolerance, rtol=tolerance)
    finally:
        dist.destroy_process_group()
