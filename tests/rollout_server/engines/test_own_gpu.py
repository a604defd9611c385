"""The tests for GPUs, on a host with several: the server has the second GPU where NCCL is tried, and only there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_rl.config import Config
from rollout_server.engines.sglang.sglang_process import server_flags
from tests.kit.configs import make_config
from tests.kit.engines.own_gpu import broadcasting, placed, transports

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
MODEL: Any = SimpleNamespace(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=96)


def flags(config: Config) -> dict[str, Any]:
    return server_flags(config, MODEL, on_gpu=True, free_memory_bytes=2**33, seed=0)


def has_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_with_two_gpus_nccl_is_tried_to_a_server_on_the_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 2)
    config = make_config(rollout={"server_args": {"attention-backend": "triton"}})
    own, shared = (flags(placed(config, own_gpu)) for own_gpu in (True, False))
    assert own == shared | {"base-gpu-id": 1} and "base-gpu-id" not in shared
    assert own["attention-backend"] == "triton"  # other settings stay
    assert transports(GPU, own_gpu=True) == [("nccl", False)]
    assert {name for name, _ in transports(GPU, own_gpu=False)} == {"cuda_ipc", "disk"}
    assert broadcasting(GPU, or_disk=True) == broadcasting(GPU, or_disk=False) == "nccl"


def test_with_one_gpu_nccl_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    has_gpus(monkeypatch, 1)
    config = make_config()
    assert flags(placed(config, own_gpu=False)) == flags(config)
    assert broadcasting(GPU, or_disk=True) == "disk" and broadcasting(CPU, or_disk=False) == "gloo"
    with pytest.raises(pytest.skip.Exception, match="needs two GPUs"):
        placed(config, own_gpu=True)
    with pytest.raises(pytest.skip.Exception, match="needs two GPUs"):
        broadcasting(GPU, or_disk=False)


def test_no_test_for_gpus_places_its_server_by_itself() -> None:
    texts = {file.name: file.read_text() for file in (Path(__file__).parents[2] / "gpu").glob("test_*.py")}
    assert [name for name, text in texts.items() if "base-gpu-id" in text] == []
    assert {name for name, text in texts.items() if "placed(" in text} == {"test_parity.py", "test_pushes.py"}
