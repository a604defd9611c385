"""SGLang's logprobs against the learner's, at equal weights: at the start, and after a push through each transport."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.config import Config, PlacementConfig, WeightSyncConfig
from async_rl.weights import open_publisher
from async_rl.weights.publisher import serving_dtype
from learner.model import full_parameters
from learner.update import Updater
from tests.conftest import EngineInThread
from tests.gpu.answers import behaviour_logprobs, generated, learner_logprobs, with_dtype
from tests.gpu.conftest import OPEN, Note

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]


def transports(device: torch.device) -> list[tuple[str, bool]]:
    """(name, whether learner and server take turns)"""
    further = "gloo" if device.type == "cpu" else "nccl" if torch.cuda.device_count() > 1 else ""
    return [("cuda_ipc", False), ("cuda_ipc", True), ("disk", False), *([(further, False)] if further else [])]


def change(updater: Updater) -> None:
    """New weights, a tenth off the old ones."""
    updater.policy.reshard()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in updater.policy.parameters():
            local = parameter.to_local()  # type: ignore[attr-defined]
            local += 0.1 * local.std(unbiased=False) * torch.randn_like(local)


def check(what: str, dtype: str, updater: Updater, server: EngineInThread, config: Config, note: Note) -> None:
    batch = generated(server, config)
    differences = behaviour_logprobs(batch) - learner_logprobs(updater, batch)
    note(what, differences, dtype=dtype)
    mean, p99 = OPEN[dtype]
    assert np.abs(differences).mean() < mean
    assert np.quantile(np.abs(differences), 0.99) < p99


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_server_and_learner_agree_at_the_start_and_after_a_push_through_each_transport(
    config: Config, device: torch.device, one_rank: None, note: Note, tmp_path: Path, dtype: str
) -> None:
    if (device.type, dtype) == ("cpu", "bfloat16"):
        pytest.skip("bfloat16 on a CPU says nothing about a GPU")
    config = with_dtype(config, dtype)
    updater = Updater(config, device)
    server = EngineInThread(dataclasses.replace(config, placement=PlacementConfig(colocated=True)), tmp_path / "logs")
    try:
        server.run(server.engine.start(), timeout_s=600.0)
        check("start", dtype, updater, server, config, note)
        for version, (transport, in_turns) in enumerate(transports(device), start=1):
            change(updater)
            pushing = dataclasses.replace(
                config, placement=PlacementConfig(colocated=in_turns),
                weight_sync=WeightSyncConfig(transport=transport, bucket_bytes=2**20),  # type: ignore[arg-type]
            )
            publisher = open_publisher(pushing, [server.engine.url], 0, device)
            publisher.connect()
            if in_turns:
                publisher.make_room()
            publisher.push(full_parameters(updater.policy, serving_dtype(config, device.type)), version)
            publisher.close()
            check(f"{transport}{' in turns' if in_turns else ''}", dtype, updater, server, config, note)
    finally:
        server.close()
