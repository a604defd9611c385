"""Tests that learner.offload frees the GPU between steps, and that training is the same."""

from __future__ import annotations

import pytest
import torch

from async_rl.base.config import Config
from learner.loop.updater import Updater
from tests.kit.configs import changed
from tests.kit.learner.random_batches import random_batch
from tests.kit.learner.updates import values_of, weights_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_offloading_frees_the_gpu_and_trains_alike(config: Config, device: torch.device, one_rank: None) -> None:
    """With `all` the optimizer computes on the CPU, which may round the other way than the GPU.

    On a GPU gradients are added in no fixed order, so there no two updates have the same bits.
    """
    batch, found, bytes_held = random_batch(config), {}, {}
    for offload in ("none", "moments", "all"):
        before = allocated(device)
        updater = Updater(changed(config, model={"dtype": "float32"}, learner={"offload": offload}), device)
        metrics = values_of(updater.update(batch))
        updater.update(batch)
        bytes_held[offload] = allocated(device) - before
        found[offload] = metrics, weights_of(updater)
        weights = 4 * sum(parameter.numel() for parameter in updater.policy.parameters())
        del updater
    loss, expected = found["none"][0]["policy/loss"], found["none"][1]
    for offload in ("moments", "all"):
        assert found[offload][0]["policy/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        for name, tensor in expected.items():
            exact = 0.0 if (offload, device.type) == ("moments", "cpu") else 1e-6
            torch.testing.assert_close(found[offload][1][name].cpu(), tensor.cpu(), atol=exact, rtol=exact)
    if device.type == "cuda":
        assert bytes_held["none"] - bytes_held["moments"] > 0.9 * 2 * weights
        assert bytes_held["moments"] - bytes_held["all"] > 0.9 * weights


def allocated(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)
