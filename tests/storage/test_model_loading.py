"""Models that can't be loaded are refused before anything starts, without reading their weights."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from async_rl.base.config import LoraConfig, ModelConfig
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_loading import load_without_weights
from async_rl.run.before_start.preflight import check_loading
from learner.memory.sizes import networks_of
from learner.stages.sft import base_tokenizer
from rollout_server.worker.eval_command import evaluate_model
from tests.kit.configs import make_config

SIZES = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 2,
}


def check(folder: Path, key: str = "model.path") -> None:
    load_without_weights(key, str(folder), "sdpa")


def check_learner(folder: Path, rank: int = 0) -> None:
    """Make the check of the learner that a run makes before it starts."""
    model = ModelConfig(path=str(folder), lora=LoraConfig(rank=rank))
    config = make_config(model=model)
    check_loading("model.path", str(folder), config, "sdpa")
    networks_of(config)


def saved(kind: str, folder: Path, head: Any = AutoModelForCausalLM, **settings: Any) -> Path:
    head.from_config(AutoConfig.for_model(kind, **{**SIZES, **settings})).save_pretrained(folder)
    return folder


def changed(tiny_model: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(tiny_model, folder)
    content = json.loads((tiny_model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return folder


def test_a_good_model_may_be_policy_reference_and_critic(tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for key in ("model.path", "reference.path", "critic.path"):
        check(tiny_model, key)
    check_learner(tiny_model, rank=2)
    assert capfd.readouterr() == ("", "")  # no progress bars, no tables of weights


def test_weights_of_another_shape_than_config_json_says_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    folder = changed(tiny_model, tmp_path / "model", intermediate_size=7)
    with pytest.raises(ConfigError, match=r"^model\.path .*: 6 weights .*: model\.layers\.0\.mlp.down_proj.weight"):
        check(folder)
    config = make_config(folder, sft={"base": str(folder)})
    with pytest.raises(ConfigError, match=r"^model\.path .*: 6 weights"):
        asyncio.run(evaluate_model(config))
    with pytest.raises(ConfigError, match=r"^sft\.base .*: 6 weights"):
        base_tokenizer(config)


def test_weights_that_the_files_lack_are_refused_but_for_the_critics_value_head(
    tiny_model: Path, tmp_path: Path
) -> None:
    deeper = changed(tiny_model, tmp_path / "deep", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ConfigError, match=r"^model\.path .* 12 weights .*: model\.layers\.2\.input_layernorm"):
        check(deeper)
    with pytest.raises(ConfigError, match=r"^reward_model\.path .* 1 weights .*: score.weight"):
        check(tiny_model, "reward_model.path")
    check(saved("qwen2", tmp_path / "judge", AutoModelForSequenceClassification, num_labels=1), "reward_model.path")


@pytest.mark.parametrize("kind", ["mpnet", "modernbert"])
def test_an_encoder_of_rewards_has_an_attention_of_its_own(tiny_model: Path, tmp_path: Path, kind: str) -> None:
    folder = saved(kind, tmp_path, AutoModelForSequenceClassification, num_labels=1)
    for attention in ("sdpa", "flex_attention"):
        model = {"path": str(tiny_model), "attn_implementation": attention}
        config = make_config(
            model=model, reward_model={"path": str(folder)}, rollout={"max_response_tokens": 32},
            task={"name": "reasoning_gym/chain_sum", "max_prompt_tokens": 64},
        )  # fmt: skip
        check_loading("reward_model.path", str(folder), config, attention)
        assert networks_of(config)[-1].role == "reward model"


@pytest.mark.parametrize(("kind", "part"), [("phi", "lm_head.bias"), ("bloom", "BloomForCausalLM")])
def test_an_architecture_that_the_learner_does_not_support_is_refused(tmp_path: Path, kind: str, part: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.path .*{part}"):
        check_learner(saved(kind, tmp_path / "model", **({"n_head": 4} if kind == "bloom" else {})))


def test_adapters_for_a_model_without_linear_layers_are_refused(tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path / "model", n_embd=32, n_layer=2, n_head=4, n_positions=128)
    check_learner(folder)
    with pytest.raises(ConfigError, match=r"^model\.lora\.rank .*got 4"):
        check_learner(folder, rank=4)
