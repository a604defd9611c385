"""Decides learner.gradient_checkpointing where it is auto, alike on all ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from async_rl.config import Config
from learner.memory.rank_memory import RankMemoryEstimate
from learner.memory.room import free_room, is_surely_small


def with_checkpointing(config: Config, device: torch.device) -> Config:
    """Return the configuration with true or false for learner.gradient_checkpointing auto. Collective.

    It is true if one rank has no room for the activations of a full micro-batch.
    """
    if config.learner.gradient_checkpointing != "auto":
        return config
    wanted = torch.tensor(float(not fits_plain(config, device.type, free_room(config, device))))
    dist.all_reduce(wanted, dist.ReduceOp.MAX)
    return replace(config, learner=replace(config.learner, gradient_checkpointing=bool(wanted)))


def fits_plain(config: Config, device_type: str, room: int) -> bool:
    """Return whether a rank with `room` bytes can train without checkpointing; False where that can't be computed."""
    if is_surely_small(config, room):
        return True
    try:
        return RankMemoryEstimate(config, device_type).rank_memory(checkpoints=False).peak <= room
    except NotImplementedError:
        return False
