from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.models.tiny_model import TINY_MODELS, character_tokenizer, tiny_model
from tests.kit.models import save_tiny_model


def test_the_chat_template_ends_a_prompt_with_the_separator() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    tokenizer = character_tokenizer()
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "a\nb<sep>"
    assert tokenizer("<sep>")["input_ids"] == [tokenizer.convert_tokens_to_ids("<sep>")]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_a_saved_tiny_model_loads_as_it_was(tmp_path: Path, name: str) -> None:
    save_tiny_model(name, tmp_path, seed=3)
    model, loaded = tiny_model(name, 3), AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == [type(model).__name__]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert 0.25e6 < sum(p.numel() for p in model.parameters()) < 0.35e6
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    made = TINY_MODELS[name].tokenizer()
    assert tokenizer.chat_template == made.chat_template
    assert len(tokenizer) == model.config.vocab_size
    assert model.config.eos_token_id == tokenizer.eos_token_id
    text = "It's  10 + 2,\n\n so: <x>\n é_<sep>"
    assert tokenizer(text)["input_ids"] == made(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text.replace("é", "")


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    one, same, other = (tiny_model("tiny-qwen2", seed) for seed in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
