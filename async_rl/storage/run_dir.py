"""Creates and locks the directory of a new run, and prepares the directory of a run that is resumed."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from async_rl.config import Config
from async_rl.config.loading import dump_config
from async_rl.errors import ConfigError
from async_rl.storage.checkpoints import (
    find_checkpoint,
    lineage_of,
    read_training_state,
    rename_later,
    run_dir_of,
)

_LOCK_FILE = ".lock"


@contextlib.contextmanager
def open_run_dir(config: Config) -> Iterator[Config]:
    """Create the directory of a run, or take that of run.resume; lock it and yield the config with its path.

    A new directory is removed if the run fails before its first step, unless its logs may explain the failure better
    than the error does.

    Raises:
        ConfigError: run.resume names no checkpoint, or its run has no step left or is locked by another process.
    """
    if not config.run.resume:
        run_dir = new_run_dir(config)
        run = dataclasses.replace(config.run, name=run_dir.name)
        saved = None
    else:
        checkpoint = find_checkpoint(config.run.resume)
        saved, run_dir = read_training_state(checkpoint), run_dir_of(checkpoint)
        if saved.version >= config.run.steps:
            raise ConfigError(
                f"run.steps must be above {saved.version}, the version of {checkpoint}, got {config.run.steps}. "
                f"Set run.steps={2 * saved.version} to train on"
            )
        run = dataclasses.replace(config.run, dir=str(run_dir.parent), name=run_dir.name, resume=str(checkpoint))
    config = dataclasses.replace(config, run=run)
    with _locked(run_dir):
        if saved is not None:
            _prepare_resume(config, saved.version)
        try:
            restartable = dataclasses.replace(config, run=dataclasses.replace(run, resume=""))
            partial = run_dir / "config.yaml.partial"
            partial.write_text(dump_config(restartable))
            partial.replace(run_dir / "config.yaml")
            yield config
        except BaseException as error:
            if saved is None and not _explains_failure(run_dir, error):
                shutil.rmtree(run_dir, ignore_errors=True)
            raise


def new_run_dir(config: Config) -> Path:
    """Create a new run directory and return its path. If the name is taken, the next free number is added to it.

    Two runs may do this at the same time.

    Raises:
        ConfigError: the directory can't be created.
    """
    for number in range(1, 10_000):
        candidate = config.run_dir if number == 1 else config.run_dir.with_name(f"{config.run.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(
                f"run.dir, run.name: {candidate} can't be created: {error.strerror}. Set run.dir=... or run.name=..."
            ) from None
        return candidate
    raise ConfigError(f"{config.run_dir}, and the same with -2 to -9999, exist already. Set run.name to another name")


def _explains_failure(run_dir: Path, error: BaseException) -> bool:
    """Whether run_dir holds metrics or logs that explain the failure better than `error`."""
    metrics = run_dir / "metrics.jsonl"
    is_measured = metrics.is_file() and metrics.stat().st_size > 0
    return is_measured or ((run_dir / "logs").exists() and not isinstance(error, ConfigError))


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Hold the lock of a directory until the end of the block or of this process.

    Raises:
        ConfigError: another process holds the lock.
    """
    with (run_dir / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{run_dir} is locked by another run that is still going on. Stop it first (Ctrl-C)"
            ) from None
        yield


def _prepare_resume(config: Config, version: int) -> None:
    """Discard what the run wrote after the checkpoint of `version`, by renaming the files or moving lines to new files.

    The new names contain the number of the lineage that ends, so that each resume keeps its own files.
    """
    run_dir, lineage = config.run_dir, lineage_of(config.run_dir)
    suffix = f"lineage_{lineage}"
    rename_later(Path(config.run.resume), version, lineage)
    for file in run_dir.glob("trajectories.sqlite*"):  # the journal and its payload files
        file.rename(run_dir / file.name.replace("trajectories", f"trajectories.{suffix}"))
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        lines = metrics.read_text().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # cut short by a crash
            lines.pop()
        kept = [line for line in lines if json.loads(line)["step"] <= version]
        if discarded := [line for line in lines if json.loads(line)["step"] > version]:
            (run_dir / f"metrics.{suffix}.jsonl").write_text("".join(discarded))
        partial = run_dir / "metrics.jsonl.partial"
        partial.write_text("".join(kept))
        partial.replace(metrics)
    # A new config.lineage_N.yaml ends the lineage. It comes last, so that after a crash before it the next resume does
    # all this again. config.yaml is copied and not renamed, because the next resume reads it.
    old_config = run_dir / "config.yaml"
    old_config.touch()
    partial = run_dir / "config.yaml.partial"
    shutil.copy(old_config, partial)
    partial.rename(run_dir / f"config.{suffix}.yaml")
