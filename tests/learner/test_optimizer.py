"""Schedules, weight decay and frozen weights of the policy's optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.config import LoraConfig, ModelConfig
from async_rl.errors import ConfigError
from learner.optimizer import decayed
from learner.updater import Updater
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.learner.updates import weights_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("end", [0.0, 0.1])
def test_the_cosine_is_that_of_torchs_scheduler(end: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=end)
    for done in range(20):
        assert decayed(done, 20, 1.0, "cosine", end) == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()


def test_rates_fall_over_the_last_part_to_a_share() -> None:
    assert [decayed(done, 10, 0.4, end=0.2) for done in range(4, 10)] == pytest.approx([1, 1, 1, 0.8, 0.6, 0.4])
    assert [decayed(done, 10, 0.5, "cosine") for done in (4, 5, 7.5, 10)] == pytest.approx([1, 1, 0.5, 0])
    assert [decayed(done, 10, 0.0, "cosine", 0.3) for done in (0, 9)] == [1, 1]


@pytest.mark.parametrize("offload", ["none", "moments"])
def test_matrices_have_weight_decay_and_biases_and_norms_have_none(
    tiny_model_path: Path, one_rank: None, offload: str
) -> None:
    lr, decay = 1e-3, 0.5
    updated = []
    for weight_decay in (0.0, decay):
        learner = {"lr": lr, "weight_decay": weight_decay, "offload": offload}
        updater = Updater(learner_config(tiny_model_path, learner=learner), CPU)
        before = weights_of(updater)
        updater.update(make_batch())
        updated.append(weights_of(updater))
    plain, decayed = updated
    assert {tensor.ndim for tensor in before.values()} == {1, 2}
    for name, start in before.items():
        expected = plain[name] - (lr * decay * start if start.ndim > 1 else 0)
        torch.testing.assert_close(decayed[name], expected, rtol=1e-5, atol=1e-8)


def test_frozen_weights_stay_and_the_others_are_trained(tiny_model_path: Path, one_rank: None) -> None:
    model = ModelConfig(path=str(tiny_model_path), frozen=("model.embed_tokens.*", "*.layers.0.*"))
    updater = Updater(learner_config(tiny_model_path, model=model), CPU)
    before = weights_of(updater)
    updater.update(make_batch())
    for name, tensor in weights_of(updater).items():
        is_frozen = "embed_tokens" in name or "layers.0." in name
        assert torch.equal(tensor, before[name]) == is_frozen, name


@pytest.mark.parametrize(
    ("frozen", "message"),
    [
        (("model.embed.*",), r"no weight has a name like 'model\.embed\.\*'\. The model has model\.embed"),
        (("*",), r"model\.frozen must leave weights to train, got \['\*'\]"),
    ],
)
def test_patterns_that_fit_nothing_or_everything_are_refused(
    tiny_model_path: Path, one_rank: None, frozen: tuple[str, ...], message: str
) -> None:
    model = ModelConfig(path=str(tiny_model_path), frozen=frozen)
    with pytest.raises(ConfigError, match=message):
        Updater(learner_config(tiny_model_path, model=model), CPU)


def test_frozen_weights_beside_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.frozen must be empty with model\.lora\.rank"):
        ModelConfig(path="m", frozen=("*.bias",), lora=LoraConfig(rank=4))
