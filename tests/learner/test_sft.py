from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, ConfigError
from learner.models.tiny_model import character_tokenizer, tiny_model
from learner.stages.sft import Demonstration, answer_demonstration, backward, base_tokenizer, train_sft
from tests.kit.configs import make_config

pytestmark = pytest.mark.processes  # together they compute for long


def config_of(base: str = "tiny-qwen2", **sft: int | float) -> Config:
    return make_config(sft={"base": base, "steps": 40, "batch_size": 16, "lr": 3e-3, **sft})


def copy_pairs() -> list[tuple[list[int], list[int]]]:
    """Return pairs whose answer repeats the letter before the separator."""
    tokenizer = character_tokenizer()
    return [
        (tokenizer(f"{letter}<sep>")["input_ids"], tokenizer(f"{letter}<eos>")["input_ids"])
        for letter in "abcdefgh"
    ]


def copy_examples() -> list[Demonstration]:
    return [answer_demonstration(*pair) for pair in copy_pairs()]


def test_a_tiny_model_learns_its_pairs_and_is_saved_with_its_tokenizer(tmp_path: Path) -> None:
    reports = list(train_sft(config_of(steps=80), copy_examples(), tmp_path))
    assert [report.version for report in reports] == [20, 40, 60, 80]
    losses = [next(m.value for m in report.metrics if m.key == "sft/loss") for report in reports]
    assert losses[-1] < 0.1 < losses[0]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for prompt, answer in copy_pairs():
        predicted = model(input_ids=torch.tensor([prompt + answer])).logits[0].argmax(-1)
        assert predicted[len(prompt) - 1 : -1].tolist() == answer
    assert (
        base_tokenizer(config_of(str(tmp_path)))("ab")["input_ids"]
        == character_tokenizer()("ab")["input_ids"]
    )


def test_training_ends_at_the_target_loss(tmp_path: Path) -> None:
    *_, last = train_sft(config_of(steps=400, target_loss=0.5), copy_examples(), tmp_path)
    assert 10 <= last.version < 100
    assert 0.2 < next(m.value for m in last.metrics if m.key == "sft/loss") < 0.5
    assert (tmp_path / "model.safetensors").exists()


def test_the_loss_is_the_mean_over_learned_tokens_for_any_micro_batches() -> None:
    two_turns = Demonstration([5, 6, 8, 2, 9, 10, 7, 2], [False, False, True, True, False, False, True, True])
    pairs = [([5, 6, 7], [8, 9, 2]), ([10], [11, 2]), ([5, 6, 7, 8, 9, 10], [2])]
    examples = [*(answer_demonstration(*pair) for pair in pairs), two_turns]
    model = tiny_model("tiny-qwen2", 0)
    total = torch.zeros(())
    for example in examples:  # by hand: one sequence at a time, no padding
        logprobs = torch.log_softmax(model(input_ids=torch.tensor([example.tokens])).logits[0], dim=-1)
        for i, token in enumerate(example.tokens):
            if example.mask[i]:
                total = total - logprobs[i - 1, token]
    expected = total / 10
    expected.backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    for max_tokens in (1, 14, 1000):
        model.zero_grad()
        assert backward(model, examples, max_tokens) == pytest.approx(expected.item(), rel=1e-5)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-4)


def test_weights_that_are_not_finite_are_named_before_and_after_training(tmp_path: Path) -> None:
    model = tiny_model("tiny-qwen2", 0)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 3] = torch.inf
    model.save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"base.*model\.layers\.1\.mlp\.up_proj\.weight"):
        next(train_sft(config_of(str(tmp_path / "base")), copy_examples(), tmp_path / "out"))
    with pytest.raises(AsyncRLError, match=r"sft\.lr"):
        list(train_sft(config_of(lr=1e20, steps=5), copy_examples(), tmp_path / "out"))
    assert not (tmp_path / "out").exists()
