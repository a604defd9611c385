"""Adapters compared with peft: its own wrapped model with the same adapters, merged by `merge_and_unload`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from async_rl.base.config import LoraConfig, ModelConfig
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.model_folder import weight_files
from async_rl.base.weights.parcels import Rebuilder
from learner.loop.updater import Updater
from learner.models.lora import AdapterParcels, without_adapters
from learner.models.policy import adapter_parcels, full_parameters
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")
TOKENS = [3, 9, 4, 1, 20, 7]


def open_updater(path: Path, **lora: Any) -> Updater:
    model = ModelConfig(path=str(path), lora=LoraConfig(**{"rank": 4, "alpha": 8.0, **lora}))
    return Updater(learner_config(path, model=model), CPU)


def trained_updater(path: Path, **lora: Any) -> Updater:
    updater = open_updater(path, **lora)
    for version in range(3):
        updater.update(make_batch(version, version))
    return updater


def whole(updater: Updater) -> dict[str, Tensor]:
    return {
        name: p.detach().full_tensor().clone() if isinstance(p, DTensor) else p.detach().clone()
        for name, p in updater.policy.lm.named_parameters()
    }


def reference_of(path: Path, updater: Updater) -> Any:
    """Return peft's own model with the updater's adapter weights."""
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=linear)).eval()
    adapters = {f"base_model.model.{name}": tensor for name, tensor in whole(updater).items() if ".lora_" in name}
    assert len(adapters) == 2 * 7 * 2
    missing = model.load_state_dict(adapters, strict=False)
    assert not missing.unexpected_keys
    return model


def logprobs_of(model: Any) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0].tolist()


def test_only_adapters_are_trained_and_the_pushed_weights_are_merged_as_by_peft(
    tiny_model_path: Path, one_rank: None
) -> None:
    updater = trained_updater(tiny_model_path)
    base = AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32)
    trained = {name for name, p in updater.policy.lm.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained)
    before = whole(updater)
    pushed = dict(full_parameters(updater.policy, torch.float32))
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole(updater).items())

    model = reference_of(tiny_model_path, updater)
    assert updater.probe_logprobs(TOKENS) == pytest.approx(logprobs_of(model), rel=1e-5)
    merged = model.merge_and_unload()
    assert pushed.keys() == {name for name, _ in base.named_parameters()}
    for name, parameter in merged.named_parameters():
        torch.testing.assert_close(pushed[name], parameter.detach(), atol=1e-6, rtol=1e-6)
    moved = {n for n, p in base.named_parameters() if not torch.equal(p.detach(), pushed[n])}
    assert moved == {n for n in pushed if n.endswith("proj.weight")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_servers_make_the_bits_of_a_merged_push_of_adapters_alone(
    tiny_model_path: Path, one_rank: None, dtype: torch.dtype
) -> None:
    updater = trained_updater(tiny_model_path)
    parcels, rebuilder = AdapterParcels(updater.policy.lm, dtype), Rebuilder(lambda: weight_files(tiny_model_path))
    for version in (3, 4):
        pushed = dict(full_parameters(updater.policy, dtype))
        rebuilt = dict(rebuilder.rebuild(adapter_parcels(updater.policy, parcels)))
        assert rebuilt.keys() == pushed.keys()
        integers = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        assert all(torch.equal(rebuilt[name].view(integers), pushed[name].view(integers)) for name in pushed)
        updater.update(make_batch(version, version))


def test_without_adapters_the_model_is_the_one_of_the_folder(tiny_model_path: Path, one_rank: None) -> None:
    updater = trained_updater(tiny_model_path)
    base = logprobs_of(AutoModelForCausalLM.from_pretrained(tiny_model_path, dtype=torch.float32))
    trained = updater.probe_logprobs(TOKENS)
    with without_adapters(updater.policy.lm):
        assert updater.probe_logprobs(TOKENS) == pytest.approx(base, rel=1e-5)
    assert updater.probe_logprobs(TOKENS) == trained != pytest.approx(base, abs=1e-3)


def test_the_chosen_layers_get_adapters_and_a_layer_that_is_none_is_refused(
    tiny_model_path: Path, one_rank: None
) -> None:
    updater = open_updater(tiny_model_path, target_modules=("q_proj", "v_proj"))
    names = {n.split(".lora_")[0].rsplit(".", 1)[-1] for n, _ in updater.policy.lm.named_parameters() if ".lora_" in n}
    assert names == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match=r"^model\.lora\.target_modules .* got lm_head"):
        open_updater(tiny_model_path, target_modules=("lm_head",))
