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


def nightly(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.nightly)


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


def shifted_experts(engine: HFEngine) -> None:
    """Each token's recorded experts are those of the token before it."""
    generate = engine.generate

    async def with_shifted_experts(request: GenerationRequest) -> list[SampledReply]:
        replies = await generate(request)
        return [dataclasses.replace(reply, routing=np.roll(reply.routing, 1, axis=0)) for reply in replies]

    engine.generate = with_shifted_experts  # type: ignore[method-assign]


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


def chosen_experts(folder: Path) -> Path:
    """A model of which each token uses two of eight experts."""
    return save_moe(folder, num_experts=8, num_experts_per_tok=2)


@pytest.mark.parametrize(("save", "dtype", "rules", "measured"), [
    (save_sharp_model, "float32", {}, set()), (chosen_experts, "bfloat16", {}, {"routing"}),
    nightly(chosen_experts, "float32", {"top_p": 0.9}, {"routing", "support"}),
    nightly(save_sharp_model, "bfloat16", {"top_k": 9}, {"support"}),
])  # fmt: skip
def test_a_sound_run_is_exact_in_float32_and_bounded_in_bfloat16(
    save: Callable[[Path], Path], dtype: str, rules: dict[str, float], measured: set[str], tmp_path: Path,
    one_rank: None,
) -> None:
    found = certified(config_of(save(tmp_path / "model"), dtype, **rules))
    state = "exact" if dtype == "float32" else "bounded"
    assert (found["weights"].state, found["precision"].state) == ("exact", state), found
    for axis in ("age of KV", "support", "routing"):
        assert found[axis].state == (state if axis in measured else "not measured"), found


@pytest.mark.parametrize(("save", "dtype", "asked", "plant", "broken", "named"), [
    (save_moe, "float32", {}, asked_otherwise(top_p=0.9), ["precision"], "support"),
    nightly(save_moe, "float32", {}, asked_otherwise(temperature=0.99), ["precision"], "temperature"),
    (save_moe, "float32", {}, stale_prefix, ["precision"], "prefix cache"),
    (save_moe, "float32", {}, loading(lambda tensors: {}), ["weights"], "other weights"),
    nightly(save_moe, "float32", {}, loading(without_an_expert), ["weights"], "other weights"),
    # Ratios over the recorded supports are 1: precision sees nothing.
    (save_moe, "float32", {"top_p": 0.9}, asked_otherwise(top_p=0.8), ["support"], ""),
    nightly(save_moe, "float32", {"top_k": 9}, asked_otherwise(top_k=8), ["support"], ""),
    (chosen_experts, "float32", {}, other_experts, ["precision", "routing"], "routing"),
    # In bfloat16 logprobs alone do not show a KV of somewhat older weights: rounding is as large.
    nightly(chosen_experts, "bfloat16", {}, asked_otherwise(top_p=0.9), ["precision"], "support"),
    nightly(chosen_experts, "bfloat16", {}, asked_otherwise(temperature=0.99), ["precision"], "temperature"),
    nightly(chosen_experts, "bfloat16", {}, loading(lambda tensors: {}), ["weights"], "other weights"),
    nightly(chosen_experts, "bfloat16", {}, loading(without_an_expert), ["weights"], "other weights"),
    nightly(chosen_experts, "bfloat16", {"top_p": 0.9}, asked_otherwise(top_p=0.8), ["support"], ""),
    nightly(chosen_experts, "bfloat16", {}, shifted_experts, ["precision", "routing"], "routing"),
])  # fmt: skip
def test_a_planted_error_is_found_and_named(
    save: Callable[[Path], Path], dtype: str, asked: dict[str, float], plant: Plant, broken: list[str], named: str,
    tmp_path: Path, one_rank: None,
) -> None:
    found = certified(config_of(save(tmp_path / "model"), dtype, **asked), plant)
    assert [name for name, axis in found.items() if axis.state == "broken"] == broken, found
    assert named in found[broken[0]].finding
