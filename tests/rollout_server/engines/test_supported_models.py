"""The check before the start of whether SGLang can serve a model and read its tool calls.

It needs SGLang's files but does not import it.
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from async_rl.base.config import Config, RolloutConfig
from async_rl.base.errors import ConfigError
from async_rl.run.before_start.preflight import check_model
from tests.kit.configs import changed, make_config
from tests.kit.models import save_bare_model
from tests.kit.tiny_moe import save_moe

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")


def config_with(folder: Path, model_type: str, architecture: str) -> Config:
    model = AutoConfig.for_model(model_type)
    model.architectures = [architecture]
    model.save_pretrained(folder)
    return make_config(folder)


@pytest.mark.parametrize(("model_type", "architecture", "named"), [
    ("qwen2", "Qwen2ForCausalLM", ""), ("smollm3", "SmolLM3ForCausalLM", ""), ("phi", "PhiForCausalLM", ""),
    ("bloom", "BloomForCausalLM", "BloomForCausalLM"), ("falcon", "FalconForCausalLM", "FalconForCausalLM"),
    ("qwen2", "MyOwnForCausalLM", "MyOwnForCausalLM"), ("gemma2", "Gemma2ForCausalLM", "hidden_act"),
])
def test_a_model_that_neither_sglang_nor_its_substitute_runs_is_refused(
    tmp_path: Path, model_type: str, architecture: str, named: str
) -> None:
    config = config_with(tmp_path, model_type, architecture)
    if not named:
        check_model(config)
        return
    with pytest.raises(ConfigError, match=rf"^rollout\.engine sglang .*{tmp_path}.*{named}"):
        check_model(config)
    check_model(replace(config, rollout=RolloutConfig(engine="hf")))


def test_supports_that_a_server_cannot_give_or_has_no_room_for_are_refused(tmp_path: Path) -> None:
    config = changed(config_with(tmp_path, "qwen2", "Qwen2ForCausalLM"), rollout={"top_p": 0.9})
    check_model(config)
    many = changed(config, rollout={"group_size": 64, "max_groups_in_flight": 256}, learner={"prompts_per_step": 256})
    # 256 * 64 replies of 151,936 ids of 8 bytes are 20 GB; 16,384 ids are 2 GiB
    with pytest.raises(ConfigError, match=r"rollout\.top_k: 16384"):
        check_model(many)
    check_model(changed(many, rollout={"top_k": 16_384}))
    check_model(changed(many, algorithm={"support": "ignore"}))
    with pytest.raises(ConfigError, match=r"algorithm\.support: ignore"):
        check_model(changed(config, rollout={"server_args": {"speculative_algorithm": "EAGLE"}}))


def test_a_mixture_that_sglang_would_serve_wrongly_or_without_its_experts_is_refused(tmp_path: Path) -> None:
    check_model(make_config(save_moe(tmp_path / "sparse")))
    dense = make_config(save_moe(tmp_path / "dense", mlp_only_layers=[1]))
    with pytest.raises(ConfigError, match=r"layers 1 "):
        check_model(dense)
    check_model(changed(dense, rollout={"engine": "hf"}))
    for flags in ({"chunked_prefill_size": -1}, {"speculative_algorithm": "EAGLE"}):
        config = make_config(tmp_path / "sparse", rollout={"server_args": flags})
        with pytest.raises(ConfigError, match=r"rollout\.routing"):
            check_model(config)
        check_model(changed(config, rollout={"routing": "ignore"}))


def test_an_engine_that_does_not_record_experts_is_refused_for_a_mixture(tmp_path: Path) -> None:
    own = make_config(save_moe(tmp_path / "moe"), rollout={"engine": "tests.extensions.engine:COUNTING"})
    assert not own.rollout.engine_entry.records_routing
    with pytest.raises(ConfigError, match=r"^rollout\.routing "):
        check_model(own)
    check_model(changed(own, rollout={"routing": "ignore"}))
    check_model(changed(own, model={"path": str(save_bare_model(tmp_path / "dense"))}))


def test_weights_that_are_packed_or_of_two_models_are_not_staged(tmp_path: Path) -> None:
    config = changed(config_with(tmp_path, "qwen2", "Qwen2ForCausalLM"), weight_sync={"double_buffer": "device"})
    check_model(config)
    drafting = changed(config, rollout={"server_args": {"speculative_algorithm": "EAGLE", "quantization": "fp8"}})
    with pytest.raises(ConfigError, match=r"quantization, speculative-algorithm"):
        check_model(drafting)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ConfigError, match="staged"):
        check_model(config)


def test_a_parser_of_tool_calls_that_sglang_lacks_is_refused_before_the_start(tmp_path: Path) -> None:
    config = config_with(tmp_path, "qwen2", "Qwen2ForCausalLM")
    for name in ("", "hermes", "llama3", "qwen", "kimi_k2", "my_module:parse"):
        check_model(changed(config, rollout={"tool_parser": name}))
    for name in ("glm5", "gpt-oss"):
        with pytest.raises(ConfigError, match=rf"tool_parser '{name}'"):
            check_model(changed(config, rollout={"tool_parser": name}))
