"""Names and shapes of pushed weights against those that `save_pretrained` writes, which servers start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_folder import weight_shapes
from async_rl.base.models_and_data.model_loading import load_without_weights
from async_rl.base.weights.checkpoint_names import check_names, from_checkpoint, to_checkpoint
from async_rl.run.before_start.preflight import check_loading
from learner.loop.ranks import Ranks
from learner.models.policy import open_policy, save_policy, shard
from tests.kit.configs import learner_config, make_config
from tests.kit.learner.exported import train_and_export
from tests.kit.tiny_moe import EXPERTS, save_moe

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}
MOE: dict[str, Any] = {**SIZES, "moe_intermediate_size": 16, "num_experts": 3, "num_experts_per_tok": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "untied": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2),
    "qwen3-moe": Qwen3MoeConfig(**MOE, head_dim=16),
    "qwen2-moe": Qwen2MoeConfig(**MOE, shared_expert_intermediate_size=16),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3),  # its experts and their layer have other names too
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("is_loaded", [True, False])
def test_weights_travel_as_save_pretrained_writes_them(name: str, is_loaded: bool, tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_config(CONFIGS[name])
    lm.save_pretrained(tmp_path)
    if is_loaded:
        lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    sent = dict(to_checkpoint(lm, lm.named_parameters()))
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[key], expected[key]) for key in sent)
    back, parameters = from_checkpoint(lm, dict(reversed(sent.items()))), dict(lm.named_parameters())
    assert back.keys() == parameters.keys()
    assert all(torch.equal(back[key], parameters[key]) for key in back)
    check_names(load_without_weights("model.path", str(tmp_path), "eager"), weight_shapes(tmp_path), "here")


def test_weights_of_dense_models_travel_one_by_one_in_their_order() -> None:
    lm = AutoModelForCausalLM.from_config(CONFIGS["tied"])
    lm._weight_conversions = []  # as after loading
    asked = []

    def named() -> Any:
        for name, tensor in lm.named_parameters():
            asked.append(name)
            yield name, tensor

    for name, tensor in to_checkpoint(lm, named()):
        assert asked[-1] == name and tensor is lm.get_parameter(name)  # no other is gathered before it is sent
    assert asked == [name for name, _ in lm.named_parameters()]


@pytest.mark.parametrize("name", ["qwen3-moe", "tied"])
def test_a_checkpoint_that_pushes_would_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    lm, shapes = load_without_weights("model.path", str(tmp_path), "eager"), weight_shapes(tmp_path)
    first = sorted(shapes)[0]
    extra = "model.layers.1.more.weight"
    wrong = [(shapes | {first: [1, 2]}, first), (shapes | {extra: [3]}, extra), ({**shapes, first: None}, first)]
    for checkpoint, said in wrong:
        with pytest.raises(ConfigError, match=rf"in 1 tensors \({said}\)"):
            check_names(lm, {key: shape for key, shape in checkpoint.items() if shape}, "here")
    check_names(lm, shapes | ({"lm_head.weight": [64, 32]} if name == "tied" else {}), "here")


def test_a_model_whose_router_is_no_parameter_is_refused_before_the_start(tmp_path: Path) -> None:
    sizes = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8}
    ranks = {"kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    config = DeepseekV3Config(**SIZES, **sizes, **ranks, moe_intermediate_size=16, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="e_score_correction_bias"):
        check_loading("model.path", str(tmp_path), make_config(tmp_path), "eager")


def test_saved_and_exported_policies_have_the_names_of_their_folder(tmp_path: Path, one_rank: None) -> None:
    source = save_moe(tmp_path / "moe")
    shapes = weight_shapes(source)
    assert f"model.layers.1.mlp.experts.{EXPERTS - 1}.down_proj.weight" in shapes
    config = learner_config(source)
    policy = open_policy(config.model, torch.float32)
    shard(policy, Ranks(torch.distributed.init_device_mesh("cpu", (1,))), config.learner)
    save_policy(policy, source, tmp_path / "saved", is_writer=True)
    assert weight_shapes(tmp_path / "saved") == shapes
    saved, start = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", source))
    assert all(torch.equal(saved[key], start[key]) for key in start)
    train_and_export(source, tmp_path, rank=2)
    assert weight_shapes(tmp_path / "out") == shapes
