from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from async_rl.base.config import AlgorithmConfig, KlConfig, LoraConfig, ModelConfig, ReferenceConfig
from async_rl.base.errors import ConfigError
from learner.algorithms.advantages import batch_advantages
from learner.loop.ranks import Ranks
from learner.loop.updater import Updater
from learner.models.reference import Reference
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.learner.updates import batch_logprobs

pytestmark = pytest.mark.processes  # together they compute for long

CPU = torch.device("cpu")


def open_both(model_path: Path, rank: int = 0, dtype: Any = "float32", **reference: Any) -> tuple[Updater, Reference]:
    model = ModelConfig(path=str(model_path), dtype=dtype, lora=LoraConfig(rank=rank))
    algorithm = AlgorithmConfig(kl=KlConfig(kind="k2_loss"))
    config = learner_config(model_path, model=model, algorithm=algorithm, reference=ReferenceConfig(**reference))
    updater = Updater(config, CPU)
    compute = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    return updater, Reference(config, updater.policy, compute, Ranks(init_device_mesh("cpu", (1,))))


def check_logprobs(updater: Updater, reference: Reference, path: Path) -> None:
    batch = make_batch()
    expected = batch_logprobs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), batch)
    (minibatch,) = updater.pack(batch, batch_advantages(updater.config, batch))
    (micro,) = minibatch.micro_batches
    found = reference.logprobs(micro.inputs)
    assert not found.requires_grad
    for row, logprobs in zip(micro.rows, found.split(micro.response.lengths), strict=True):
        torch.testing.assert_close(logprobs, expected[row], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("rank", "offload"), [(0, False), (0, True), (4, False)])
def test_the_reference_stays_the_model_of_the_folder_while_the_policy_moves(
    tiny_model_path: Path, one_rank: None, rank: int, offload: bool
) -> None:
    updater, reference = open_both(tiny_model_path, rank, offload=offload)
    for version in range(3):
        updater.update(make_batch(version, version))
    moved = updater.probe_logprobs([3, 9, 4, 1])
    check_logprobs(updater, reference, tiny_model_path)
    assert updater.probe_logprobs([3, 9, 4, 1]) == moved
    assert (reference.lm is updater.policy.lm) == (rank > 0)  # LoRA: the policy without adapters, no second model


def test_a_reference_of_another_folder_is_that_model_also_with_adapters(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    torch.manual_seed(7)
    config = AutoModelForCausalLM.from_pretrained(tiny_model_path).config
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "other")
    updater, reference = open_both(tiny_model_path, 4, path=str(tmp_path / "other"))
    check_logprobs(updater, reference, tmp_path / "other")


def test_a_reference_with_another_vocabulary_is_refused(
    tiny_model_path: Path, tmp_path: Path, one_rank: None
) -> None:
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=29, num_key_value_heads=2, **shape)).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"^reference\.path .*23 .*got 29"):
        open_both(tiny_model_path, path=str(tmp_path / "other"))
