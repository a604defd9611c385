"""A critic, reference or reward model that can't read the rows of a run is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_loading import usable_positions
from async_rl.run.before_start.preflight import check_inputs, check_loading
from learner.models.tiny_model import character_tokenizer
from tests.kit.configs import make_config
from tests.kit.models import save_bare_reward_model

pytestmark = pytest.mark.processes  # together they compute for long

KEYS = ("critic.path", "reference.path")
TOKENS = 100
"""The character tokenizer has 4 special tokens, 10 digits, 52 letters, 32 signs, the space and the end of a line."""


def check(policy: Path, key: str, other: Path, **sections: object) -> None:
    section = key.partition(".")[0]
    algorithm = {"advantage": "gae"} if section == "critic" else {"kl": {"kind": "k2_loss"}}
    run = {"dir": other.parent / "runs"}
    check_inputs(make_config(policy, algorithm=algorithm, run=run, **{section: {"path": str(other)}}, **sections))


def resized(policy: Path, folder: Path, rows: int) -> Path:
    """The policy's model with another number of embeddings, and without a tokenizer."""
    lm = AutoModelForCausalLM.from_pretrained(policy)
    lm.resize_token_embeddings(rows)
    lm.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("key", KEYS)
def test_a_model_with_fewer_embeddings_than_the_policy_has_tokens_is_refused(
    key: str, tiny_model: Path, tmp_path: Path
) -> None:
    check(tiny_model, key, resized(tiny_model, tmp_path / "enough", TOKENS))
    with pytest.raises(ConfigError, match=f"^{key} .*got 99"):
        check(tiny_model, key, resized(tiny_model, tmp_path / "other", TOKENS - 1))


@pytest.mark.parametrize("key", KEYS)
def test_a_model_whose_tokenizer_gives_an_id_to_another_token_is_refused(
    key: str, tiny_model: Path, tmp_path: Path
) -> None:
    other = resized(tiny_model, tmp_path / "other", TOKENS)
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(other)
    described = json.loads((other / "tokenizer.json").read_text())
    ids = described["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (other / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=f"^{key} .*tokenizer"):
        check(tiny_model, key, other)


@pytest.mark.parametrize("key", KEYS)
def test_a_model_with_fewer_positions_than_the_longest_row_has_tokens_is_refused(
    key: str, tiny_model: Path, tmp_path: Path
) -> None:
    other = resized(tiny_model, tmp_path / "other", TOKENS)
    described = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 99}))
    sizes = {"task": {"name": "reasoning_gym/chain_sum", "max_prompt_tokens": 80}}
    check(tiny_model, key, other, rollout={"max_response_tokens": 19}, **sizes)
    with pytest.raises(ConfigError, match=f"^{key} .* 100 or more positions.*got 99"):
        check(tiny_model, key, other, rollout={"max_response_tokens": 20}, **sizes)


def check_reward_model(policy: Path, folder: Path) -> None:
    check_loading("reward_model.path", str(folder), make_config(policy, reward_model={"path": str(folder)}), "sdpa")


def test_too_few_positions_of_a_reward_model_are_refused_if_it_reads_tokens(
    tiny_model: Path, tmp_path: Path
) -> None:
    tokens = save_bare_reward_model(tmp_path / "tokens", vocab=TOKENS, max_position_embeddings=99)
    with pytest.raises(ConfigError, match=r"^reward_model\.path .*got 99"):
        check_reward_model(tiny_model, tokens)
    check_reward_model(tiny_model, save_bare_reward_model(tmp_path / "long", vocab=TOKENS))


@pytest.mark.parametrize(("kind", "expected"), [("bert", 10), ("roberta", 8), ("mpnet", 8), ("xlm-roberta", 8)])
def test_the_rows_of_a_table_of_positions_up_to_the_one_for_padding_are_not_counted(kind: str, expected: int) -> None:
    lm = AutoModel.from_config(AutoConfig.for_model(
        kind, vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=10, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    ))  # fmt: skip
    assert usable_positions(lm) == expected
    lm(torch.full((1, expected), 5))
    with pytest.raises((IndexError, RuntimeError)):
        lm(torch.full((1, expected + 1), 5))
