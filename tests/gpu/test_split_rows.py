"""Rows that two GPUs split (learner.sequence_parallel) have the gradient of whole ones, by NCCL and flex attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from async_rl.base.config import Config, LearnerPlacement, PlacementConfig
from async_rl.base.network import agree_on_nccl
from learner.loop.updater import Updater
from tests.kit.configs import changed
from tests.kit.learner.random_batches import random_batch
from tests.kit.learner.updates import gradients

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def rank_main(rank: int, store_file: str, out: str, config: Config, device_type: str) -> None:
    """Each of two ranks takes part in one pass; rank 0 writes the gradient."""
    agree_on_nccl()
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store_file, 2), rank=rank, world_size=2)
    found = {name: whole.cpu() for name, whole in gradients(Updater(config, device), random_batch(config)).items()}
    if rank == 0:
        torch.save(found, out)
    dist.destroy_process_group()


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_rows_that_two_gpus_split_have_the_gradient_of_whole_ones(
    config: Config, device: torch.device, one_rank: None, tmp_path: Path, attention: str
) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    if (device.type, attention) == ("cpu", "flex_attention"):
        pytest.skip("flex attention has no gradient on a CPU")
    settings: dict[str, Any] = {"model": {"dtype": "float32", "attn_implementation": attention}}
    whole = changed(config, **settings)
    split = changed(
        whole, placement=PlacementConfig(learner=LearnerPlacement(ranks=2)),
        learner={"sequence_parallel": 2, "max_tokens_per_microbatch": 4096},
    )
    out = tmp_path / "gradients.pt"
    mp.start_processes(
        rank_main, (str(tmp_path / "store"), str(out), split, device.type), nprocs=2, start_method="spawn"
    )
    found = torch.load(out, weights_only=True)
    for name, expected in gradients(Updater(whole, device), random_batch(whole)).items():
        torch.testing.assert_close(found[name], expected.cpu(), atol=1e-4 * float(expected.abs().max()), rtol=1e-3)
