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

    That is RUN_BYTES, the resulting model, two copies of it for a weight transport that writes files, and the
    checkpoints of `checkpoint_bytes` each.

    Raises:
        ConfigError: the directory can't be written or has too little space.
    """
    key = "run.resume" if config.run.resume else "run.dir"
    folder = run_dir_of(find_checkpoint(config.run.resume)) if config.run.resume else config.run_dir
    parent = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ConfigError(f"{key}: {parent} is no folder, or may not be written, got {folder}. Choose another one")
    model_bytes = sum(file.stat().st_size for file in weight_files(Path(config.model.path)))
    checkpoint, there = config.checkpoint, len(list_checkpoints(folder)) if config.run.resume else 0
    kept = checkpoint.keep_last + checkpoint.keep_best + 1  # and the one that is being written
    if every := checkpoint.every_steps:
        kept = max(1, min(kept, -(-config.run.steps // every)) - there)
    transport = config.weight_sync.transport_entry
    copies = 3 if transport is None or transport.writes_files else 1
    needed = RUN_BYTES + copies * model_bytes + (kept * checkpoint_bytes if every else 0)
    if (free := shutil.disk_usage(parent).free) < needed:
        raise ConfigError(
            f"{key}: too little disk for a run in {folder}: {free / 2**30:.1f} GiB free, {needed / 2**30:.1f} GiB "
            f"needed for the model and {kept} checkpoints of {checkpoint_bytes / 2**30:.1f} GiB "
            "(checkpoint.keep_last, keep_best). Free some, keep fewer, or choose a folder on another disk"
        )


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
