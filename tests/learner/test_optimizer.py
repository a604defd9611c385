"""The policy's optimizer: which one, schedules, weight decay and frozen weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from async_rl.base.config import ModelConfig
from async_rl.base.errors import ConfigError
from learner.loop.optimizer import decayed
from learner.loop.updater import Updater
from learner.memory.sizes import state_bytes
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch
from tests.kit.learner.updates import values_of, weights_of

CPU = torch.device("cpu")
SHAPES = [(64, 64), (64,)]
"""A matrix and a bias."""


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
    ("pattern", "got"), [("model.embed.*", r"model\.embed_tokens"), ("*", r"got \['\*'\]")]
)
def test_patterns_that_fit_nothing_or_everything_are_refused(
    tiny_model_path: Path, one_rank: None, pattern: str, got: str
) -> None:
    model = ModelConfig(path=str(tiny_model_path), frozen=(pattern,))
    with pytest.raises(ConfigError, match=rf"^model\.frozen.*{got}"):
        Updater(learner_config(tiny_model_path, model=model), CPU)


def test_another_optimizer_of_torch_moves_the_weights_by_its_own_rule(tiny_model_path: Path, one_rank: None) -> None:
    """The first step of SGD is the clipped gradient times the rate, whatever the momentum."""
    learner = {"lr": 0.1, "grad_clip": 0.5, "optimizer": "SGD", "optimizer_params": {"momentum": 0.9}}
    updater = Updater(learner_config(tiny_model_path, learner=learner), CPU)
    before = weights_of(updater)
    metrics = values_of(updater.update(make_batch()))
    moved = torch.cat([(after - before[name]).flatten() for name, after in weights_of(updater).items()])
    assert moved.norm().item() == pytest.approx(0.1 * min(0.5, metrics["policy/grad_norm"]), rel=1e-4)


def test_an_optimizer_from_outside_trains_matrices_by_a_rule_of_their_own(
    tiny_model_path: Path, one_rank: None
) -> None:
    """The first step of Muon moves a matrix by about its rate in its main direction, AdamW each number."""
    settings = {"optimizer": "tests.extensions.optimizer:MuonWithAdamW", "optimizer_params": {"muon_factor": 20.0}}
    updater = Updater(learner_config(tiny_model_path, learner={"lr": 1e-3, "grad_clip": 1e9, **settings}), CPU)
    before = weights_of(updater)
    updater.update(make_batch())
    moved = {name: after - before[name] for name, after in weights_of(updater).items()}
    matrix = next(tensor for name, tensor in moved.items() if name.endswith("layers.0.self_attn.q_proj.weight"))
    norm = next(tensor for name, tensor in moved.items() if name.endswith("model.norm.weight"))
    assert torch.linalg.matrix_norm(matrix, 2).item() == pytest.approx(20 * 1e-3, rel=0.4)
    assert norm.abs().max().item() == pytest.approx(1e-3, rel=0.01)


def test_an_optimizer_that_knows_no_sharded_weights_is_refused_at_once(tiny_model_path: Path, one_rank: None) -> None:
    """torch's Adafactor takes a norm in place, which DTensor has not."""
    with pytest.raises(ConfigError, match=r"^learner\.optimizer Adafactor"):
        Updater(learner_config(tiny_model_path, learner={"optimizer": "Adafactor"}), CPU)


@pytest.mark.parametrize("name", ["adamw", "paged_adamw_8bit", "Muon", "collections:Counter", "two words"])
def test_an_optimizer_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^learner\.optimizer "):
        state_bytes(learner_config(learner={"optimizer": name}).learner, SHAPES)


@pytest.mark.parametrize(
    ("key", "learner"),
    [
        ("optimizer", {"optimizer": "SGD", "optimizer_params": {"eps": 1}}),
        ("weight_decay", {"optimizer": "Rprop", "weight_decay": 0.1}),
        ("offload", {"optimizer": "SGD", "offload": "moments"}), ("optimizer_params", {"optimizer_params": {"lr": 1}}),
    ],
)
def test_settings_that_an_optimizer_does_not_take_are_refused(key: str, learner: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=rf"^learner\.{key} "):
        state_bytes(learner_config(learner=learner).learner, SHAPES)
