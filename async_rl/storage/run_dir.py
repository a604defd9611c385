"""The directory of a run: made new, or taken up again where its checkpoint was."""

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
    TrainingState,
    find_checkpoint,
    lineage_of,
    read_training_state,
    run_dir_of,
    set_aside_later,
)

_LOCK_FILE = ".lock"


@contextlib.contextmanager
def open_run_dir(config: Config) -> Iterator[Config]:
    """The config to run with, its run_dir being this run's alone: a new one, or that of run.resume.

    A new one of a run that fails before its first step goes again, unless a process of it has left a log that may tell
    more than the error.

    Raises:
        ConfigError: run.resume names nothing to resume, or a run that is still going on or has no step left.
    """
    if not config.run.resume:
        run_dir = new_run_dir(config)
        run = dataclasses.replace(config.run, name=run_dir.name)
        cut = None
    else:
        checkpoint = find_checkpoint(config.run.resume)
        cut, run_dir = read_training_state(checkpoint), run_dir_of(checkpoint)
        if cut.version >= config.run.steps:
            raise ConfigError(
                f"run.steps must be above {cut.version}, the version of {checkpoint}, got {config.run.steps}. "
                f"Set run.steps={2 * cut.version} to train on"
            )
        run = dataclasses.replace(config.run, dir=str(run_dir.parent), name=run_dir.name, resume=str(checkpoint))
    config = dataclasses.replace(config, run=run)
    with _locked(run_dir):
        if cut is not None:
            _take_up(config, cut)
        try:
            restartable = dataclasses.replace(config, run=dataclasses.replace(run, resume=""))
            partial = run_dir / "config.yaml.partial"
            partial.write_text(dump_config(restartable))
            partial.replace(run_dir / "config.yaml")
            yield config
        except BaseException as error:
            if cut is None and not _tells_more(run_dir, error):
                shutil.rmtree(run_dir, ignore_errors=True)
            raise


@contextlib.contextmanager
def open_buffer_dir(config: Config) -> Iterator[None]:
    """run_dir for a buffer that serves alone: new, or with the journal of an earlier one. Nobody else's meanwhile.

    Raises:
        ConfigError: it can't be created; or it is a run's, whose journal is no other buffer's to write to; or another
            buffer is using it.
    """
    if not config.buffer.journal:  # nothing is kept
        yield
        return
    run_dir = config.run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_created(run_dir, error) from None
    with _locked(run_dir):
        if (run_dir / "config.yaml").exists():
            raise ConfigError(
                f"run.name must name a new folder or that of a buffer alone, got {config.run.name}: {run_dir} holds a "
                f"run. Set run.name to another one, or buffer.journal=false"
            )
        yield


def new_run_dir(config: Config) -> Path:
    """Create the run directory; a name that is taken gets the next free number, also between two runs at once.

    Raises:
        ConfigError: it can't be created there.
    """
    for number in range(1, 10_000):
        candidate = config.run_dir if number == 1 else config.run_dir.with_name(f"{config.run.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise _not_created(candidate, error) from None
        return candidate
    raise ConfigError(f"run.name {config.run.name}: {config.run_dir} and 9998 numbered ones exist. Set run.name=...")


def _tells_more(run_dir: Path, error: BaseException) -> bool:
    """Than `error`, with which a new run ended: what it has measured, or logs where they may say why."""
    metrics = run_dir / "metrics.jsonl"
    is_measured = metrics.is_file() and metrics.stat().st_size > 0
    return is_measured or ((run_dir / "logs").exists() and not isinstance(error, ConfigError))


def _not_created(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"run.dir, run.name: {folder} can't be created: {error.strerror}. Set run.dir=... or run.name=..."
    )


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Until the end of the block or of this process, however it comes.

    Raises:
        ConfigError: another process holds it.
    """
    with (run_dir / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"{run_dir} must be in no other's use, got one whose run or buffer is still going on. "
                "End that first (Ctrl-C)"
            ) from None
        yield


def _take_up(config: Config, cut: TrainingState) -> None:
    """Make the directory that of a run which has come to the cut; what came after it is kept beside, out of use.

    Each resume sets aside under a number of its own, so that none replaces what another one kept.
    """
    run_dir, lineage = config.run_dir, lineage_of(config.run_dir)
    suffix = f"lineage_{lineage}"
    set_aside_later(Path(config.run.resume), cut.version, lineage)
    for file in run_dir.glob("trajectories.sqlite*"):  # with what is kept beside it
        file.rename(run_dir / file.name.replace("trajectories", f"trajectories.{suffix}"))
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        lines = metrics.read_text().splitlines(keepends=True)
        if lines and not lines[-1].endswith("\n"):  # cut short by a crash
            lines.pop()
        kept = [line for line in lines if json.loads(line)["step"] <= cut.version]
        if len(kept) < len(lines):
            lost = [line for line in lines if json.loads(line)["step"] > cut.version]
            (run_dir / f"metrics.{suffix}.jsonl").write_text("".join(lost))
        partial = run_dir / "metrics.jsonl.partial"
        partial.write_text("".join(kept))
        partial.replace(metrics)
    # Last, as it ends the lineage: a resume that is cut short before this is taken up by the next one. A copy, as the
    # next one reads config.yaml, too.
    old_config = run_dir / "config.yaml"
    old_config.touch()
    partial = run_dir / "config.yaml.partial"
    shutil.copy(old_config, partial)
    partial.rename(run_dir / f"config.{suffix}.yaml")
