"""Checks before a run that the disk has the space that the run needs, and explains the error of a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from async_rl.config import Config
from async_rl.config.guard import WINDOWS_BACK
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.seams import TRANSPORTS
from async_rl.storage.checkpoints import find_checkpoint, list_checkpoints, read_training_state, run_dir_of
from async_rl.storage.model_folder import weight_files

RUN_BYTES = 2**30
"""Space for the logs and metrics of a run, besides its model and checkpoints."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


def check_disk(config: Config, checkpoint_bytes: int) -> None:
    """Check that the run directory can be written and has the disk space that the run needs.

    A run needs RUN_BYTES, the checkpoints that exist at the same time, and copies of the model's files: one for the
    result, those of checkpoint.models_every_steps (with run.seconds, which leaves their number open, one of them), and
    two for a weight transport that passes weights through folders.

    Args:
        checkpoint_bytes: the size of one checkpoint.

    Raises:
        ConfigError: the directory can't be written or has too little space.
    """
    resumed = run_dir_of(find_checkpoint(config.run.resume)) if config.run.resume else None  # it stays where it is
    if not resumed:
        _check_is_folder(Path(config.run.dir).absolute())
    parent = resumed or existing_parent(config.run_dir)
    if not os.access(parent, os.W_OK):
        place, remedy = ("run.resume", "Copy it and resume the copy") if resumed else ("run.dir", "Set run.dir=...")
        raise ConfigError(f"{place} {resumed or config.run.dir}: no permission to write in {parent}. {remedy}")
    count, needed_bytes = _num_checkpoints(config), run_bytes(config, checkpoint_bytes)
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"too little disk for a run in {resumed or config.run_dir}: {_gib(free_bytes)} free in {parent}, "
            f"{_gib(needed_bytes)} needed, {_gib(count * checkpoint_bytes)} of it for {count} checkpoints (trained "
            "weights in float32, and what the optimizer keeps for them; while one is written, checkpoint.keep_last and "
            "keep_best others exist, and those to which guard.action or alarms.action may go back). Free some, keep "
            "fewer, or "
            f"{'copy the run' if resumed else 'set run.dir=...'} to another disk"
        )


def check_log_disk(config: Config) -> None:
    """Check that a host on which nothing of a run but logs may be written has room for them at the run's path.

    Raises:
        ConfigError: the run's path can't be written on this host, or its disk has too little space.
    """
    resumed = config.run.resume
    place, remedy = ("run.resume", "resume a copy of the run in") if resumed else ("run.dir", "set run.dir=... to")
    folder = Path(resumed or config.run_dir).absolute()
    _check_is_folder(folder, place)
    parent = existing_parent(folder)
    if not os.access(parent, os.W_OK):
        raise ConfigError(
            f"{place} {folder}: no permission to write in {parent}, where the processes of this host write their "
            f"logs. Permit it, or {remedy} a folder that every host can write"
        )
    free_bytes = shutil.disk_usage(parent).free
    if free_bytes < RUN_BYTES:
        raise ConfigError(
            f"too little disk for the logs of this host in {folder}: {_gib(free_bytes)} free in {parent}, "
            f"{_gib(RUN_BYTES)} needed. Free some, or {remedy} a folder of another disk"
        )


def run_bytes(config: Config, checkpoint_bytes: int) -> int:
    """Return the disk space that a run needs at most, see check_disk."""
    model = Path(config.model.path)
    model_bytes = sum(file.stat().st_size for file in weight_files(model)) if model.is_dir() else 0
    num_models = 3 if _may_write_model_folders(config) else 1
    if config.checkpoint.models_every_steps:
        of_steps = config.run.steps // config.checkpoint.models_every_steps
        num_models += min(1, of_steps) if config.run.seconds else of_steps  # run.steps is then a mere upper limit
    return RUN_BYTES + num_models * model_bytes + _num_checkpoints(config) * checkpoint_bytes


@contextlib.contextmanager
def full_disk_named(run_dir: Path) -> Iterator[None]:
    """Turn the error of a full disk in the `with` block into one that says what to do; other errors pass as they are.

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
    return next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())


def _check_is_folder(path: Path, key: str = "run.dir") -> None:
    for folder in (path, *path.parents):
        if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
            raise ConfigError(f"{key} must be a folder or not exist yet, got {path}: {folder} is no folder")


def _may_write_model_folders(config: Config) -> bool:
    """Whether the transport that weight_sync.transport names, or may choose, passes weights through folders."""
    if named := config.weight_sync.transport_entry:
        return named.writes_files
    engines = config.engine_entries.values()
    return any(t.writes_files for t in TRANSPORTS.values() if all(t.delivers in engine.receives for engine in engines))


def _num_checkpoints(config: Config) -> int:
    """Return the largest number of checkpoints on the disk at one time, without those that a resume finds there and
    those that a rollback of the guard sets aside.
    """
    every, best = config.checkpoint.every_steps, config.checkpoint.keep_best
    if every == 0:
        return 0
    keep = config.checkpoint.keep_last + best + bool(best)  # with keep_best one more stays until it is measured
    if config.guard.acts:
        keep += _most_guarded(config)
    if config.alarms.action == "stop":  # the one before the trouble, and those that batches to come were sampled by
        keep += 2 + config.staleness.max // every
    if not config.run.resume:
        return min(keep + 1, -(-config.run.steps // every))
    checkpoint = find_checkpoint(config.run.resume)
    version = read_training_state(checkpoint).version  # a resume renames later checkpoints, which stay on the disk
    there = [earlier for earlier in list_checkpoints(run_dir_of(checkpoint)) if earlier <= version]
    return max(1, keep + 1 - len(there))


def _most_guarded(config: Config) -> int:
    """Return the largest number of checkpoints that the guard needs at one time besides those of keep_last: those of
    its newest windows and, with gold rewards, of the newest evaluations and of the best ones.
    """
    every, newest = config.checkpoint.every_steps, config.checkpoint.keep_last
    periods = [config.guard.every_steps, *([config.eval.every_steps] if config.has_gold else [])]
    most = 0
    for version in range(every, min(config.run.steps, 2 * (WINDOWS_BACK + 1) * max(every, *periods)) + 1, every):
        needed = {
            (version // period - back) * period // every * every
            for period in periods if period for back in range(WINDOWS_BACK + 1)
        }
        kept = {version - back * every for back in range(newest)}
        most = max(most, len({each for each in needed - kept if each > 0}))
    return most + config.has_gold


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
