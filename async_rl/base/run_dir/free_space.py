"""Checks before a run that the disk has enough space for it, and explains the error of a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from async_rl.base.config import Config
from async_rl.base.errors import AsyncRLError, ConfigError
from async_rl.base.models_and_data.model_folder import weight_files
from async_rl.base.run_dir.checkpoints import find_checkpoint, list_checkpoints, run_dir_of

RUN_BYTES = 2**30
"""Space for a run's logs and metrics."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_disk(config: Config, checkpoint_bytes: int) -> None:
    """Check that the run directory can be written and that its disk has room for the run.

    Args:
        checkpoint_bytes: the size of one checkpoint.

    Raises:
        ConfigError: the directory can't be written or has too little space.
    """
    key = "run.resume" if config.run.resume else "run.dir"
    folder = run_dir_of(find_checkpoint(config.run.resume)) if config.run.resume else config.run_dir
    parent = existing_parent(folder)
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        why = "no permission to write in" if parent.is_dir() else "this is no folder:"
        raise ConfigError(f"{key}: {why} {parent}, got {folder}. Choose another folder")
    free_bytes, needed_bytes = shutil.disk_usage(parent).free, run_bytes(config, checkpoint_bytes)
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{key}: too little disk for a run in {folder}: {_gib(free_bytes)} free in {parent}, {_gib(needed_bytes)} "
            f"needed, {_gib(_num_checkpoints(config) * checkpoint_bytes)} of it for {_num_checkpoints(config)} "
            "checkpoints (checkpoint.keep_last, keep_best). Free some, keep fewer, or choose a folder on another disk"
        )


def run_bytes(config: Config, checkpoint_bytes: int) -> int:
    """Return the most disk space that a run needs.

    That is RUN_BYTES, the checkpoints, and copies of the model's files: the result, the copies of
    checkpoint.models_every_steps (one, if run.seconds leaves their number open), and two for a weight transport that
    writes files.
    """
    model = Path(config.model.path)
    model_bytes = sum(file.stat().st_size for file in weight_files(model)) if model.is_dir() else 0
    transport, every = config.weight_sync.transport_entry, config.checkpoint.models_every_steps
    num_models = 3 if transport is None or transport.writes_files else 1
    if every:
        num_models += 1 if config.run.seconds else config.run.steps // every
    return RUN_BYTES + num_models * model_bytes + _num_checkpoints(config) * checkpoint_bytes


@contextlib.contextmanager
def full_disk_named(run_dir: Path) -> Iterator[None]:
    """A context that converts the error of a full disk to one that says what to do. Other errors pass unchanged.

    Raises:
        AsyncRLError: the block failed because a disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise AsyncRLError(
            f"a disk is full: {error.filename or run_dir} can't be written ({error.strerror}). Free some, then go on "
            f"from the newest checkpoint, if there is one: async-rl train --resume {run_dir}"
        ) from None


def existing_parent(path: Path) -> Path:
    """Return the nearest existing folder among `path` and its parents."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if folder.exists())


def _num_checkpoints(config: Config) -> int:
    """Return the most checkpoints on the disk at a time, including the one that is being written."""
    checkpoint = config.checkpoint
    if checkpoint.every_steps == 0:
        return 0
    kept = checkpoint.keep_last + checkpoint.keep_best + bool(checkpoint.keep_best)  # one stays until it is measured
    number = min(kept + 1, -(-config.run.steps // checkpoint.every_steps))
    there = len(list_checkpoints(run_dir_of(find_checkpoint(config.run.resume)))) if config.run.resume else 0
    return max(1, number - there)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
