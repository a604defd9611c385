"""Creates and locks the directory of a run, and writes its config. resuming.py prepares the directory of a resumed run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from async_rl.base.config import Config
from async_rl.base.config.loading import dump_config
from async_rl.base.config.resolve import Decided, resolve
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import (
    RESUMING,
    lineage_of,
)
from async_rl.base.run_dir.files import whole_lines, write_whole

_LOCK_FILE = ".lock"
NEW_CONFIG = "config.resuming.yaml"
"""The file with the config of a resume until the resume's first step."""
_ASKED_NAME = ".asked_name"
"""The file with the original run.name: a directory gets a number if the name is taken."""
INTERRUPTED = "interrupted"
"""A key in the summary of a run that Ctrl-C or SIGTERM has ended."""


@contextlib.contextmanager
def open_new_run_dir(config: Config, decided: Decided) -> Iterator[Decided]:
    """A context that creates and locks the directory of a new run, and yields `decided` with the run's name.

    If the block ends before a step is logged, the directory is removed, unless its logs are needed to explain an error.

    Raises:
        ConfigError: the directory can't be created, or the disk has no file locks.
    """
    run_dir = new_run_dir(config)
    decided = {**decided, "run.name": run_dir.name}
    try:
        with locked(run_dir):
            write_config(resolve(config, decided))
            yield decided
    except BaseException as error:
        tells_all = isinstance(error, ConfigError | KeyboardInterrupt) or not (run_dir / "logs").exists()
        if tells_all and not _has_step(run_dir):
            shutil.rmtree(run_dir, ignore_errors=True)
        raise


def new_run_dir(config: Config) -> Path:
    """Create a new run directory and return its path. If the name is taken, the next free number is added to it.

    Two runs may call it simultaneously.

    Raises:
        ConfigError: the directory can't be created.
    """
    for number in range(1, 10_000):
        candidate = numbered(config, number)
        try:
            candidate.mkdir(parents=True)
            write_whole(candidate / _ASKED_NAME, config.run.name)
        except FileExistsError:
            continue
        except OSError as error:
            raise _uncreatable(candidate, error) from None
        return candidate
    raise ConfigError(f"{config.run_dir}, and the same with -2 to -9999, exist already. Set run.name to another name")


def create_folder(folder: Path) -> None:
    """Create a folder for several runs if it does not exist. Raises ConfigError if it can't be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _uncreatable(folder, error) from None


def _uncreatable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.dir, run.name: {folder} can't be created: {error.strerror}. Set run.dir=... or run.name=..."
    )


def is_of_newest_end(summary: Mapping[str, Any], last_step: int, run_dir: Path) -> bool:
    """Return whether a summary.json describes the run's present end. The run may have continued or gone back after it.

    Args:
        last_step: the last step in metrics.jsonl.
    """
    steps, resumes = summary.get("steps"), lineage_of(run_dir)
    return isinstance(steps, int) and steps >= last_step and summary.get("resumes", resumes) >= resumes


def write_config(config: Config) -> None:
    """Write the run's config.yaml. A resumed run calls this at its first step or its end; after that it is not undone.
    """
    write_whole(config.run_dir / "config.yaml", config_text(config))
    remove_marker(config.run_dir)


def config_text(config: Config) -> str:
    """Return the content of config.yaml: the configuration without run.resume."""
    return dump_config(resolve(config, {"run.resume": ""}))


def remove_marker(run_dir: Path) -> None:
    """Remove the files that mark a directory as resumed and still without a step."""
    for name in (RESUMING, NEW_CONFIG):
        (run_dir / name).unlink(missing_ok=True)


def numbered(config: Config, number: int) -> Path:
    return config.run_dir if number == 1 else config.run_dir.with_name(f"{config.run.name}-{number}")


def asked_name(run_dir: Path) -> str:
    """Return the run.name for which a directory was made; "" if that is not recorded."""
    file = run_dir / _ASKED_NAME
    return file.read_text() if file.is_file() else ""


def _has_step(run_dir: Path) -> bool:
    """Return whether metrics.jsonl has a trained step. A new run that failed without one may be removed."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.is_file() and any(json.loads(line)["step"] > 0 for line in whole_lines(metrics))


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Within this context the process has the lock of a directory.

    Its end, or the end of the process, releases the lock.

    Raises:
        ConfigError: another process has the lock, the disk has no locks, or the directory can't be written.
    """
    try:
        file = (run_dir / _LOCK_FILE).open("w")
    except OSError as error:
        raise ConfigError(
            f"{run_dir} must be a folder that this run can write, got {error.strerror}. A run goes on in its own "
            "directory: ask for the permission to write there, or copy all of it and resume the copy"
        ) from None
    with file as lock:
        if not has_locked(lock):
            raise ConfigError(f"{run_dir} is locked by another run that is still going on. Stop it first (Ctrl-C)")
        yield


def has_locked(file: TextIO) -> bool:
    """Try to lock a file until it is closed. Returns False if another process has the lock.

    Raises:
        ConfigError: the disk has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"run.dir must be on a disk with file locks, got {file.name}, which can't be locked: {error.strerror}. "
            "Set run.dir=... to another disk, or mount this one with them (Lustre: -o flock)"
        ) from None
    return True


def is_locked(run_dir: Path) -> bool:
    """Return whether another process is running a run in this directory.

    Raises:
        ConfigError: the disk has no locks.
    """
    file = run_dir / _LOCK_FILE
    if not file.is_file():
        return False
    with file.open("w") as lock:
        return not has_locked(lock)
