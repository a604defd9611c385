"""The GPU on which a test for GPUs has its server, and the ways it pushes to it: NCCL refuses two ranks on one GPU."""

from __future__ import annotations

import pytest
import torch

from async_rl.base.config import Config
from tests.kit.configs import changed

OWN_GPU = pytest.mark.parametrize("own_gpu", [False, True])
"""Whether the server has a GPU of its own, the second one; the learner has the first."""


def transports(device: torch.device, own_gpu: bool) -> list[tuple[str, bool]]:
    """(name, whether learner and server take turns)"""
    if own_gpu:
        return [("nccl", False)]
    further = [("gloo", False)] if device.type == "cpu" else []
    return [("cuda_ipc", False), ("cuda_ipc", True), ("disk", False), *further]


def placed(config: Config, own_gpu: bool) -> Config:
    """Return `config` with its server on the GPU that it has; the test is skipped where there is no second one."""
    if own_gpu and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    server_args = config.rollout.server_args | ({"base-gpu-id": 1} if own_gpu else {})
    return changed(config, rollout={"server_args": server_args})


def broadcasting(device: torch.device, *, or_disk: bool) -> str:
    """Return the transport that broadcasts between learner and server here, or with one GPU `disk`, if it will do."""
    if device.type == "cpu":
        return "gloo"
    if torch.cuda.device_count() > 1:
        return "nccl"
    if not or_disk:
        pytest.skip("needs two GPUs: NCCL refuses two ranks on one")
    return "disk"
