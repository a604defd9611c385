"""Sparse pushes, pushes of adapters alone and staged pushes into a server on a GPU: it holds the learner's weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from async_rl.base.config import Config, LoraConfig, PlacementConfig, WeightSyncConfig
from async_rl.base.weights.publisher import open_publisher
from async_rl.base.weights.transport import serving_dtype
from learner.loop.updater import Updater
from learner.models.lora import AdapterParcels
from learner.models.policy import adapter_parcels, full_parameters
from tests.kit.configs import changed
from tests.kit.engines.in_thread import EngineInThread
from tests.kit.engines.noted_pushes import expected_sums
from tests.kit.engines.own_gpu import broadcasting, placed
from tests.kit.learner.served_batches import Note, check_agreement, generated

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

FORMS: dict[str, dict[str, Any]] = {"delta": {"delta": True}, "adapter": {"lora": "adapter"},
                                    "staging": {"double_buffer": "device"}}  # fmt: skip


def change(updater: Updater, share: float) -> None:
    """Change a share of the trained values by a tenth of their spread."""
    updater.policy.reshard()  # type: ignore[operator]
    with torch.no_grad():
        for parameter in updater.policy.parameters():
            if parameter.requires_grad:
                local = parameter.to_local()  # type: ignore[attr-defined]
                spread = local.std(unbiased=False) if local.any() else 0.01  # an adapter's B begins with zeros
                local += 0.1 * spread * torch.randn_like(local) * (torch.rand_like(local) < share)


@pytest.mark.parametrize("form", FORMS)
def test_a_server_holds_the_learners_weights_after_each_push(
    config: Config, device: torch.device, one_rank: None, note: Note, tmp_path: Path, form: str
) -> None:
    """A server adds adapters on another device than the learner, so that its bits may differ from the learner's."""
    transport = broadcasting(device, or_disk=form != "staging")
    config = placed(config, own_gpu=transport == "nccl")
    config = changed(
        config, model={"dtype": "bfloat16", "lora": LoraConfig(rank=4 * (form == "adapter"))},
        placement=PlacementConfig(),
        # in place the prompts, which are the same each time, would be answered from their KV of the version before
        weight_sync=WeightSyncConfig(transport=transport, on_update="retract", bucket_bytes=2**20, **FORMS[form]),
    )  # fmt: skip
    dtype = serving_dtype(config, device.type)
    server, updater = EngineInThread(config, tmp_path / "logs"), Updater(config, device)
    parcels = AdapterParcels(updater.policy.lm, dtype) if form == "adapter" else None
    reports = []
    try:
        server.run(server.engine.start(), timeout_s=600.0)
        publisher = open_publisher(config, [server.engine.url], 0, device)
        publisher.transport.connect()
        for version in (1, 2, 3):
            change(updater, 0.05 if form == "delta" else 1.0)
            weights = full_parameters(updater.policy, dtype) if parcels is None else None
            pushed = weights or adapter_parcels(updater.policy, parcels)  # type: ignore[arg-type]
            reports.append(publisher.push(pushed, version, erases=version == 1))
            if parcels is None:
                whole = {name: tensor.cpu() for name, tensor in full_parameters(updater.policy, dtype)}
                admin: Any = publisher.members.admin("rollout/0")
                assert admin.sums_of_weights() == expected_sums("sglang", whole, dtype)
            check_agreement(f"{form} by {transport}", updater, generated(server, config), note)
        publisher.close()
    finally:
        server.close()
    check_sizes(form, [dataclasses.asdict(report) for report in reports])


def check_sizes(form: str, reports: list[dict[str, Any]]) -> None:
    if form == "delta":
        assert reports[0]["changed_share"] == 1.0
        assert all(report["num_bytes"] < 0.3 * reports[0]["num_bytes"] for report in reports[1:])
    elif form == "staging":
        assert all(report["pause_s"] < report["seconds"] for report in reports)
