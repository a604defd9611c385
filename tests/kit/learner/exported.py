"""Trains a model for three versions, saves a checkpoint, and exports it like `async-rl export`."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.base.config import LoraConfig, ModelConfig, RunConfig
from async_rl.base.config.loading import dump_config
from async_rl.base.run_dir.checkpoints import TrainingState, checkpoint_folder
from learner.loop.checkpointing import Checkpointer
from learner.loop.updater import Updater
from learner.models.export import export
from tests.kit.configs import learner_config
from tests.kit.learner.batches import make_batch

TOKENS = [3, 7, 5, 11, 13, 4, 9]


def train_and_export(model: Path, folder: Path, rank: int) -> list[float]:
    """Write folder/out and return the policy's logprobs of TOKENS[1:]. It needs a process group of one rank.

    Args:
        rank: of the LoRA adapters; 0: without adapters.
    """
    device = torch.device("cpu")
    lora = ModelConfig(path=str(model), lora=LoraConfig(rank=rank))
    config = learner_config(model, model=lora, run=RunConfig(dir=str(folder / "runs")))
    updater = Updater(config, device)
    for version in range(3):
        updater.update(make_batch(seed=version, version=version))
    checkpointer = Checkpointer(config, updater.optimizers, device)
    counts = checkpointer.counts()
    state = TrainingState(version=3, lineage=0, ranks=1, networks=counts, kl_coef=0.0, buffer={})
    checkpointer.save(checkpoint_folder(config.run_dir, 3), state)
    checkpointer.close()
    (config.run_dir / "config.yaml").write_text(dump_config(config))
    logprobs = updater.probe_logprobs(TOKENS)
    dist.destroy_process_group()  # the command runs without a process group
    try:
        assert export(config.run_dir, folder / "out") == checkpoint_folder(config.run_dir, 3)
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return logprobs
