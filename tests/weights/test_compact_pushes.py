"""Compact pushes by gloo from one process to servers in others: the bits they make whole, who joins, and who dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.base.config import Config, LoraConfig
from async_rl.base.weights import WeightPublisher, open_publisher
from async_rl.base.weights.members import Member
from learner.models.lora import AdapterParcels, merged_parameters
from tests.kit.configs import changed, server_config
from tests.kit.engines.pushes import adapted_model
from tests.kit.engines.serving_process import ServingProcess, checksums
from tests.kit.models import save_sharp_model, sharp_model
from tests.kit.publishers import fill, names

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharp_model(tmp_path_factory.mktemp("model"))


def compact(folder: Path, rank: int = 0, **sync: Any) -> Config:
    return changed(
        server_config("hf", folder), model={"dtype": "bfloat16", "lora": LoraConfig(rank=rank)},
        weight_sync={"transport": "gloo", "bucket_bytes": 20_000, **sync}, timeouts={"push_s": 100.0},
    )


def open_for(config: Config, servers: list[ServingProcess]) -> WeightPublisher:
    return open_publisher(config, [server.url for server in servers], 0, torch.device("cpu"))


def check_served(servers: list[ServingProcess], weights: Weights, version: int) -> None:
    for server in servers:
        assert server.served() == (version, checksums(weights, torch.bfloat16))


def stepped(weights: Weights, seed: int) -> Weights:
    """The weights after a step that changes one value in a hundred, some of them in their sign alone."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(tensor.shape, generator=generator) < 0.01, -tensor, tensor)
        for name, tensor in weights.items()
    }


def test_a_server_in_another_process_merges_adapters_to_the_learners_bits(folder: Path) -> None:
    config = compact(folder, rank=4, lora="adapter")
    with ServingProcess(folder, "bfloat16") as server:
        publisher = open_for(config, [server])
        for version in (1, 2):
            lm = adapted_model(config, seed=version)
            report = publisher.push(AdapterParcels(lm, torch.bfloat16).parcels(), version, erases=version == 1)
            whole = dict(merged_parameters(lm))
            assert report.num_bytes < 0.6 * sum(2 * tensor.numel() for tensor in whole.values())
            check_served([server], whole, version)
        publisher.close()


def test_changes_reach_servers_exactly_also_after_one_has_died_and_another_joined(
    folder: Path
) -> None:
    weights: Weights = {name: p.detach() for name, p in sharp_model("tiny-qwen2", 3).named_parameters()}
    with ServingProcess(folder, "bfloat16") as first, ServingProcess(folder, "bfloat16") as second:
        publisher = open_for(compact(folder, delta=True), [first, second])
        publisher.lost_within_s = 30.0
        whole = publisher.push(weights.items(), 1, erases=True)
        assert whole.changed_share == 1.0
        weights = stepped(weights, 1)
        sparse = publisher.push(weights.items(), 2)
        assert sparse.changed_share < 0.011
        assert sparse.num_bytes < 0.2 * whole.num_bytes
        check_served([first, second], weights, 2)

        def killing(weights: Weights) -> Iterator[tuple[str, Tensor]]:
            for number, item in enumerate(weights.items()):
                if number == len(weights) // 2:
                    second.process.kill()
                yield item

        before, weights = weights, stepped(weights, 2)
        assert names(publisher.push(killing(weights), 3).lost) == ("rollout/1",)
        check_served([first], before, 2)  # nothing of the broken push
        again = publisher.push(weights.items(), 3)
        assert (again.lost, again.changed_share) == ((), 1.0)  # whole, as nobody can say what the survivor has got
        check_served([first], weights, 3)
        with ServingProcess(folder, "bfloat16") as third:
            with first.held():
                filled = fill(publisher, [Member("rollout/1", third.url, 2)], weights.items(), 3, erases=True)
            assert filled.changed_share == 1.0
            check_served([first, third], weights, 3)
            for version in (4, 5):
                weights = stepped(weights, version)
                report = publisher.push(weights.items(), version)
                assert report.changed_share < 0.011 and not report.has_failed
                check_served([first, third], weights, version)
        publisher.close()
