"""A second set of weights in a process of SGLang's, with models that load as SGLang's do: through their submodules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollout_server.engines.sglang.staged_weights import Announcement, StagedWeights


class Layer(nn.Module):
    """Has a weight whose loader is a method of the layer in use, as those of SGLang are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, parameter: nn.Parameter, value: Tensor) -> None:
        parameter.data.copy_(value)


class Model(nn.Module):
    """Two layers, a head tied to the first, a weight that no checkpoint has, and one that is derived."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = self.layers[0]
        self.scale = nn.Parameter(torch.full((1,), 7.0), requires_grad=False)
        self.table = nn.Parameter(torch.arange(2), requires_grad=False)
        self.doubled = torch.zeros(2)

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, value in named:
            weight: Any = self.layers[int(name)].weight
            weight.weight_loader(weight, value)

    def post_load_weights(self) -> None:
        self.doubled = 2 * self.layers[0].weight.data


def part(*, is_first: bool = False, is_last: bool = False, place: str = "device") -> Announcement:
    return Announcement(names=[], dtypes=[], shapes=[], place=place, is_first=is_first, is_last=is_last)


def weights(model: Model) -> list[list[float]]:
    return [layer.weight.tolist() for layer in model.layers]


@pytest.mark.parametrize("place", ["device", "host"])
def test_parts_are_loaded_beside_the_weights_in_use_until_they_are_swapped(place: str) -> None:
    model, staged = Model(), StagedWeights()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    for version in (1.0, 2.0):
        before = weights(model)
        staged.load(model, [("0", torch.full((2,), version))], part(is_first=True, place=place))
        with pytest.raises(ValueError):
            staged.swap(model)
        staged.load(model, [("1", torch.full((2,), -version))], part(is_last=True, place=place))
        assert weights(model) == before
        staged.swap(model)
        assert weights(model) == [[version, version], [-version, -version]]
    assert model.doubled.tolist() == [4.0, 4.0]
    assert model.head is model.layers[0]
    assert (float(model.scale), model.table.tolist()) == (7.0, [0, 1])
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses  # captured graphs hold them
    with pytest.raises(ValueError):
        staged.swap(model)


def test_a_weight_that_a_push_does_not_bring_is_not_taken_from_the_push_before() -> None:
    model, staged = Model(), StagedWeights()
    staged.load(model, [("0", torch.ones(2)), ("1", torch.ones(2))], part(is_first=True, is_last=True))
    staged.swap(model)
    staged.load(model, [("0", torch.full((2,), 2.0))], part(is_first=True, is_last=True))
    model.layers[1].weight.data.fill_(torch.nan)  # as before a push that is verified
    staged.swap(model)
    assert weights(model)[0] == [2.0, 2.0]
    assert model.layers[1].weight.isnan().all()
