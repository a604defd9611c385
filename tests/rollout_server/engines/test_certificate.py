"""Certificates of the hf engine and a learner: sound ones, and errors planted in the engine, each of which is named."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout_server.engines.base import GenerationRequest, SampledReply
from rollout_server.engines.hf.engine import HFEngine
from tests.kit.engines.certified import Plant, certified, config_of
from tests.kit.engines.routed import experts_as_sampled
from tests.kit.models import save_sharp_model
from tests.kit.tiny_moe import save_moe

pytestmark = pytest.mark.processes  # together they compute for long

def asked_otherwise(**changes: Any) -> Plant:
    """The server samples with other settings than it is asked for."""

    def plant(engine: HFEngine) -> None:
        generate = engine.generate

        async def with_changes(request: GenerationRequest) -> list[SampledReply]:
            return await generate(dataclasses.replace(request, **changes))

        engine.generate = with_changes  # type: ignore[method-assign]

    return plant


def stale_prefix(engine: HFEngine) -> None:
    """The KV of prompts comes from the weights of now for ever: a prefix cache that no push empties."""
    batch, old = engine.training, copy.deepcopy(engine.model)
    prefill = batch._prefill

    def from_cache(prompts: list[np.ndarray]) -> Any:
        _, *of_now = prefill(prompts)
        now = batch._model, batch._routing
        batch._model, batch._routing = old, None
        cache, *_ = prefill(prompts)
        batch._model, batch._routing = now
        return cache, *of_now

    batch._prefill = from_cache  # type: ignore[method-assign]


def other_experts(engine: HFEngine) -> None:
    """The recorded experts are those that the weights of now would choose, for ever."""
    old, generate = copy.deepcopy(engine.model), engine.generate

    async def with_old_experts(request: GenerationRequest) -> list[SampledReply]:
        replies = await generate(request)
        return [
            dataclasses.replace(
                reply, routing=experts_as_sampled(defaultdict(lambda: old), request.prompt.tokens, reply, True)
            )
            for reply in replies
        ]  # fmt: skip

    engine.generate = with_old_experts  # type: ignore[method-assign]


def loading(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Plant:
    """The server loads other weights than it gets."""

    def plant(engine: HFEngine) -> None:
        load = engine.load_weights

        async def load_changed(tensors: dict[str, torch.Tensor], version: int) -> None:
            await load(change(tensors), version)

        engine.load_weights = load_changed  # type: ignore[method-assign]

    return plant


def without_an_expert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = "model.layers.1.mlp.experts.down_proj"
    return tensors | {name: torch.cat([tensors[name][:1] * 0, tensors[name][1:]])}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["dense", "experts"])
def test_a_sound_run_is_exact_in_float32_and_bounded_in_bfloat16(
    dtype: str, family: str, tmp_path: Path, one_rank: None
) -> None:
    model = save_sharp_model(tmp_path / "model") if family == "dense" else chosen_experts(tmp_path)
    found = certified(config_of(model, dtype))
    assert found["weights"].state == "exact"
    assert found["precision"].state == ("exact" if dtype == "float32" else "bounded"), found
    assert found["age of KV"].state == found["support"].state == "not measured"
    routing = "not measured" if family == "dense" else found["precision"].state
    assert found["routing"].state == routing


def chosen_experts(folder: Path) -> Path:
    """A model of which each token uses two of eight experts."""
    return save_moe(folder / "model", num_experts=8, num_experts_per_tok=2)


def test_experts_of_another_version_are_named(tmp_path: Path, one_rank: None) -> None:
    found = certified(config_of(chosen_experts(tmp_path)), other_experts)
    assert [name for name, axis in found.items() if axis.state == "broken"] == ["precision", "routing"], found
    assert found["precision"].finding.startswith("routing")


@pytest.mark.parametrize(("rules", "dtype"), [({"top_p": 0.9}, "float32"), ({"top_k": 9}, "bfloat16")])
def test_a_sound_run_over_supports_is_exact_or_bounded_too(
    rules: dict[str, float], dtype: str, tmp_path: Path, one_rank: None
) -> None:
    found = certified(config_of(save_moe(tmp_path / "model"), dtype, **rules))
    state = "exact" if dtype == "float32" else "bounded"
    assert (found["precision"].state, found["support"].state) == (state, state), found


@pytest.mark.parametrize(("asked", "served"), [({"top_p": 0.9}, {"top_p": 0.8}), ({"top_k": 9}, {"top_k": 8})])
def test_another_top_p_or_top_k_at_the_server_is_found_also_over_supports(
    asked: dict[str, float], served: dict[str, float], tmp_path: Path, one_rank: None
) -> None:
    """Ratios over the recorded supports are 1: precision sees nothing."""
    found = certified(config_of(save_moe(tmp_path / "model"), **asked), asked_otherwise(**served))
    assert [name for name, axis in found.items() if axis.state == "broken"] == ["support"], found


@pytest.mark.parametrize(
    ("plant", "axis", "named"),
    [
        (asked_otherwise(top_p=0.9), "precision", "support"),
        (asked_otherwise(temperature=0.99), "precision", "temperature"),
        (stale_prefix, "precision", "prefix cache"),
        (loading(lambda tensors: {}), "weights", "other weights"),
        (loading(without_an_expert), "weights", "other weights"),
    ],
    ids=["top_p", "temperature", "stale prefix", "no weight", "no expert"],
)
def test_a_planted_error_is_found_and_named(
    plant: Plant, axis: str, named: str, tmp_path: Path, one_rank: None
) -> None:
    found = certified(config_of(save_moe(tmp_path / "model")), plant)
    assert found[axis].state == "broken" and named in found[axis].finding, found
    assert [other.name for other in found.values() if other.state == "broken"] == [axis]
