"""How much an optimizer keeps is known before a run, from a step with small weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from learner.loop.optimizer import open_optimizer
from learner.memory.sizes import checkpoint_bytes, state_bytes
from tests.kit.configs import learner_config
from tests.kit.models import save_bare_model

SHAPES = [(70, 50), (70, 50), (50,), (30, 400), (3, 40, 20)]


def kept(shapes: list[tuple[int, ...]], **learner: Any) -> int:
    return state_bytes(learner_config(learner=learner).learner, shapes)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("AdamW", {}), ("AdamW", {"amsgrad": True}), ("SGD", {}), ("SGD", {"momentum": 0.9}), ("Adafactor", {}),
        ("RMSprop", {"centered": True}), ("Adagrad", {}), ("Rprop", {}), ("NAdam", {}),
        ("tests.extensions.optimizer:MuonWithAdamW", {}),
    ],
)
def test_the_bytes_are_those_that_the_optimizer_has_after_a_step(name: str, params: dict[str, Any]) -> None:
    shapes = [shape for shape in SHAPES if len(shape) < 3] if name.startswith("tests") else SHAPES
    config = learner_config(learner={"optimizer": name, "optimizer_params": params}).learner
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = open_optimizer(config, weights, lr=1e-3)
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    tensors = [t for weight in weights for t in optimizer.state[weight].values() if isinstance(t, Tensor)]
    assert state_bytes(config, shapes) == sum(t.nbytes for t in tensors if t.numel() > 1)


def test_embeddings_are_told_from_other_matrices_by_their_rows() -> None:
    """Muon keeps one number for each weight, AdamW, which trains embeddings beside it, two."""
    muon = "tests.extensions.optimizer:MuonWithAdamW"
    assert kept([(151_936, 896), (4864, 896)], optimizer=muon) == 8 * 151_936 * 896 + 4 * 4864 * 896


def test_a_checkpoint_has_what_is_trained_and_what_the_optimizer_keeps_for_it(tmp_path: Path) -> None:
    path = save_bare_model(tmp_path)
    lm = {name: tuple(tensor.shape) for name, tensor in load_file(path / "model.safetensors").items()}
    numbers = sum(map(math.prod, lm.values()))

    def size(**sections: Any) -> int:
        return checkpoint_bytes(learner_config(path, **sections))

    assert size() == 12 * numbers
    assert size(learner={"optimizer": "SGD"}) == 4 * numbers
    assert size(learner={"optimizer": "SGD", "optimizer_params": {"momentum": 0.9}}) == 8 * numbers
    embeddings = math.prod(lm["model.embed_tokens.weight"])
    assert size(model={"frozen": ["model.embed_tokens.*"]}) == 12 * (numbers - embeddings)
    assert size(algorithm={"advantage": "gae"}) == pytest.approx(24 * numbers, rel=0.01)  # and a value head
    adapters = 2 * sum(sum(shape) for name, shape in lm.items() if name.endswith("_proj.weight"))
    assert size(model={"lora": {"rank": 2}}) == 12 * adapters
