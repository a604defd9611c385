"""Training from and to checkpoints, without the processes of a run."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from async_rl.base.config import Config
from async_rl.base.run_dir.checkpoints import TrainingState
from learner.loop.checkpointing import Checkpointer
from learner.loop.updater import Updater
from tests.kit.learner.batches import make_batch
from tests.kit.runs import training_state

CPU = torch.device("cpu")


def state_at(checkpointer: Checkpointer, version: int) -> TrainingState:
    return training_state(version, ranks=dist.get_world_size(), networks=checkpointer.counts())


def train(config: Config, steps: int, folder: Path | None = None, save_at: int = -1) -> Updater:
    """Train `steps` steps, from the checkpoint in `folder`, or from the start and save one there at `save_at`."""
    updater = Updater(config, CPU)
    checkpointer = Checkpointer(config, updater.optimizers, CPU)
    first = 0
    if folder and save_at < 0:
        first = checkpointer.load(folder).version
    for version in range(first, first + steps):
        if folder and version == save_at:
            checkpointer.save(folder, state_at(checkpointer, version))
        updater.update(make_batch(seed=version, version=version))
    checkpointer.close()
    return updater
