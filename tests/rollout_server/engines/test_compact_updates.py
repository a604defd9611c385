"""Compact pushes into the hf engine, whose weights can be looked at: adapters and changes become whole weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.base.config import LoraConfig
from async_rl.base.errors import WeightSyncError
from async_rl.base.weights import WeightPublisher, open_publisher
from async_rl.base.weights.members import Member
from async_rl.base.weights.parcels import Rebuilder
from learner.models.lora import AdapterParcels, merged_parameters
from tests.kit.configs import changed, server_config
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.pushes import adapted_model
from tests.kit.models import save_sharp_model, sharp_model
from tests.kit.publishers import fill

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engines(folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[EngineInThread]]:
    """Two engines of the type that the test names."""
    config = changed(server_config("hf", folder), model={"dtype": request.param})
    engines = [EngineInThread(config, tmp_path) for _ in range(2)]
    for engine in engines:
        engine.run(engine.engine.start())
    yield engines
    for engine in engines:
        engine.close()


def open_for(engines: list[EngineInThread], run_dir: Path, count: int = 1, **sync: Any) -> WeightPublisher:
    rank = 4 if sync.get("lora") == "adapter" else 0
    config = changed(
        engines[0].config, run={"dir": run_dir}, model={"lora": LoraConfig(rank=rank)},
        weight_sync={"transport": "disk", "bucket_bytes": 100_000, **sync},
    )
    return open_publisher(config, [engine.engine.url for engine in engines[:count]], 0, CPU)


def served(engine: EngineInThread) -> dict[str, Tensor]:
    model: Any = engine.engine
    return {name: parameter.detach().clone() for name, parameter in model.model.named_parameters()}


def check_bits(engine: EngineInThread, weights: dict[str, Tensor], dtype: torch.dtype) -> None:
    kept = served(engine)
    assert kept.keys() == weights.keys()
    integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
    for name, tensor in weights.items():
        assert torch.equal(kept[name].view(integers), tensor.detach().to(dtype).view(integers)), name


@pytest.mark.parametrize(
    ("engines", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)], indirect=["engines"]
)
def test_adapters_that_the_server_merges_give_the_bits_of_a_merged_push(
    engines: list[EngineInThread], dtype: torch.dtype, tmp_path: Path
) -> None:
    merged = open_for(engines, tmp_path / "merged")
    adapters = open_for(engines[1:], tmp_path / "adapters", lora="adapter")
    for version in (1, 2):
        lm = adapted_model(adapters.config, seed=version)
        parcels = AdapterParcels(lm, dtype)
        sizes = [
            merged.push(merged_parameters(lm), version).num_bytes,
            adapters.push(parcels.parcels(), version, erases=version == 1).num_bytes,
        ]
        assert sizes[1] < 0.5 * sizes[0]
        check_bits(engines[0], dict(merged_parameters(lm)), dtype)
        check_bits(engines[1], served(engines[0]), dtype)
    merged.close()
    adapters.close()


@pytest.mark.parametrize("engines", ["bfloat16"], indirect=True)
def test_adapters_of_another_base_are_refused(
    engines: list[EngineInThread], tmp_path: Path
) -> None:
    publisher = open_for(engines, tmp_path, lora="adapter")
    publisher.lost_within_s = 0.1
    other = changed(publisher.config, model={"path": str(save_sharp_model(tmp_path / "other", seed=9))})
    parcels = AdapterParcels(adapted_model(other, 1), torch.bfloat16)
    assert publisher.push(parcels.parcels(), 1).repeats
    with pytest.raises(WeightSyncError, match=r"model\.path"):
        publisher.push(parcels.parcels(), 1)
    publisher.close()


def stepped(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The weights after a step that changes one value in a hundred."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < 0.01, -1.5 * tensor, tensor)
        for name, tensor in weights.items()
    }


@pytest.mark.parametrize("engines", ["bfloat16"], indirect=True)
def test_a_sparse_push_gives_exact_bits_also_to_a_server_that_was_filled(
    engines: list[EngineInThread], tmp_path: Path
) -> None:
    publisher = open_for(engines, tmp_path, delta=True)
    weights = {name: p.detach() for name, p in sharp_model("tiny-qwen2", 3).named_parameters()}
    reports = []
    for version in range(1, 5):
        reports.append(publisher.push(weights.items(), version, erases=version in (1, 3)))
        if version == 3:
            joiner = Member("rollout/1", engines[1].engine.url, 1)
            filled = fill(publisher, [joiner], weights.items(), version, erases=True)
        for engine in engines[: 1 + (version >= 3)]:
            check_bits(engine, weights, torch.bfloat16)
        weights = stepped(weights, version)
    assert [report.changed_share < 0.011 for report in [*reports, filled]] == [False, True, True, True, False]
    sparse_bytes, whole_bytes = [r.num_bytes for r in reports[1:]], [reports[0].num_bytes, filled.num_bytes]
    assert max(sparse_bytes) < 0.1 * min(whole_bytes)
    publisher.close()


@pytest.mark.parametrize("engines", ["bfloat16"], indirect=True)
def test_a_server_that_can_not_use_a_sparse_push_gets_whole_weights(
    engines: list[EngineInThread], tmp_path: Path
) -> None:
    publisher = open_for(engines, tmp_path, count=2, delta=True)
    publisher.lost_within_s = 0.1
    weights = {name: p.detach() for name, p in sharp_model("tiny-qwen2", 3).named_parameters()}
    publisher.push(weights.items(), 1)
    hf: Any = engines[1].engine
    hf.endpoints.rebuilder = Rebuilder(list)  # as after a restart at the same address
    weights = stepped(weights, 1)
    report = publisher.push(weights.items(), 2)
    assert report.repeats and not report.lost and "rollout/1" in report.cause
    assert not publisher.push(weights.items(), 2).has_failed
    for engine in engines:
        check_bits(engine, weights, torch.bfloat16)
    publisher.close()
