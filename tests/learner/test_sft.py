from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, ConfigError
from learner.models.tiny_model import character_tokenizer, tiny_model
from learner.stages.sft import Demonstration, answer_demonstration, backward, base_tokenizer, lr_factor, train_sft
from tests.kit.configs import changed, make_config
from tests.kit.models import save_tiny_model

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


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    for name in ("a", "b"):
        list(train_sft(config_of(steps=5), copy_examples(), tmp_path / name))
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_a_folder_can_be_the_base(tmp_path: Path) -> None:
    save_tiny_model("tiny-llama", tmp_path / "base", seed=0)
    list(train_sft(config_of(str(tmp_path / "base"), steps=2), copy_examples(), tmp_path / "out"))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "llama"


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


def test_the_learning_rate_rises_stays_and_falls() -> None:
    # 1000 steps: 150 up, the last 200 down.
    steps = (0, 74, 149, 150, 799, 800, 900, 999)
    expected = [1 / 150, 0.5, 1, 1, 1, 1, 0.5, 1 / 200]
    assert [lr_factor(done, 1000) for done in steps] == pytest.approx(expected)
    expected = [0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1, 0.5]
    assert [lr_factor(done, 10) for done in range(10)] == pytest.approx(expected)
    assert lr_factor(0, 1) == 1


def test_no_examples_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got no"):
        next(train_sft(config_of(), [], tmp_path))


def test_large_batches_are_split_by_the_learners_token_budget(tmp_path: Path) -> None:
    config = config_of(steps=2)
    small = changed(config, learner={"max_tokens_per_microbatch": 768})
    for name, variant in (("whole", config), ("split", small)):
        list(train_sft(variant, [answer_demonstration(list(range(5, 95)), [7, 8, 2])] * 16, tmp_path / name))
    whole, split = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "split"))
    for a, b in zip(whole.parameters(), split.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-3)


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
