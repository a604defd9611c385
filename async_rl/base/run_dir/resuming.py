"""Prepares the directory of a run for a resume, and puts back what a resume set aside that has made no step."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.config.loading import dump_config, load_config
from async_rl.base.config.resolve import resolve
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import (
    FOLDER,
    MODELS,
    RESUMING,
    TrainingState,
    later_models,
    lineage_of,
    lineage_of_checkpoint,
    list_checkpoints,
    rename_later,
)
from async_rl.base.run_dir.files import write_whole

_NAMED = " named"
"""The end of the marker RESUMING of a resume whose checkpoint run.resume names."""
_NEW_CONFIG = "config.resuming.yaml"
"""The file with the config of a resume until its first step."""
_MARKER = re.compile(rf"lineage_(\d+) (\d+)( {MODELS})?(?:{_NAMED})?")


class _Marker(NamedTuple):
    """The content of the marker RESUMING."""

    lineage: int
    """The number of the lineage that ends with the resume."""
    version: int
    """The version of the checkpoint from which the run continues."""
    has_moved_models: bool

    @property
    def suffix(self) -> str:
        return f"lineage_{self.lineage}"

    def past_config(self, run_dir: Path) -> Path:
        """Return the file with the config of the lineage that ends, which is there once all is set aside."""
        return run_dir / f"config.{self.suffix}.yaml"


def resuming_since_s(run_dir: Path) -> float | None:
    """Return since when, by time.time(), a resume of a run has been on its way to its first step; None: there is none.

    The resume may also have been killed before that step.
    """
    try:
        return (run_dir / RESUMING).stat().st_mtime
    except OSError:
        return None


def resumes_named_checkpoint(run_dir: Path) -> bool:
    """Return whether run.resume names the checkpoint of a resume on its way to its first step, and not only the run."""
    try:
        return (run_dir / RESUMING).read_text().endswith(_NAMED)
    except OSError:
        return False


def write_config(config: Config) -> None:
    """Write the run's config.yaml. A resumed run calls this at its first step or its end, and is not undone then."""
    write_whole(config.run_dir / "config.yaml", _text(config))
    _remove_marker(config.run_dir)


def prepare_resume(config: Config, saved: TrainingState, is_named: bool) -> None:
    """Set aside what the run wrote after the checkpoint `saved`: rename its files, move lines of metrics.jsonl.

    The new names contain the number of the lineage that ends, so that each resume keeps its own files. The number is
    the largest that a file's name, a checkpoint or summary.json has, because the user may have deleted some of them.
    """
    run_dir, version, summary = config.run_dir, saved.version, config.run_dir / "summary.json"
    told = json.loads(summary.read_text()).get("resumes", 0) if summary.is_file() else 0
    marker = _Marker(max(_newest_lineage(run_dir), told), version, has_moved_models=True)
    suffix = marker.suffix
    write_whole(run_dir / RESUMING, f"{suffix} {version} {MODELS}{_NAMED if is_named else ''}")
    write_whole(run_dir / _NEW_CONFIG, _text(config))
    rename_later(Path(config.run.resume), version, marker.lineage)
    for file in _files_in_use(run_dir):
        stem, _, rest = file.name.partition(".")
        file.rename(run_dir / f"{stem}.{suffix}.{rest}")
    if (status := run_dir / "status.json").exists():  # copied, as it is shown until the driver writes the next one
        write_whole(run_dir / f"status.{suffix}.json", status.read_text())
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists():
        lines = whole_lines(metrics)
        kept = [line for line in lines if json.loads(line)["step"] <= version]
        if discarded := [line for line in lines if json.loads(line)["step"] > version]:
            (run_dir / f"metrics.{suffix}.jsonl").write_text("".join(discarded))
        write_whole(metrics, "".join(kept))
    # A new config.lineage_N.yaml ends the lineage. It comes last, as the sign for `undo_resume` that all is renamed.
    old_config = run_dir / "config.yaml"
    old_config.touch()
    partial = run_dir / "config.yaml.partial"
    shutil.copy(old_config, partial)
    partial.rename(marker.past_config(run_dir))


def check_origin(config: Config, saved: TrainingState) -> None:
    """Check that a resume keeps the model that the run began with, and the scale of its adapters.

    Nothing is checked if the config of the checkpoint `saved` is gone or can't be read.

    Raises:
        ConfigError: another model.path would change the reference of the KL term; another model.lora.alpha would change
            the weight of the adapters, also in the version of the checkpoint.
    """
    past = _config_of(config.run_dir, saved.lineage)
    if past is None:
        return
    check(
        os.path.abspath(config.model.path) == os.path.abspath(past.model.path), "model.path", config.model.path,
        f"{past.model.path}, with which the run of {config.run.resume} began",
        f"If that folder was moved, write its new place into {config.run_dir / 'config.yaml'}; for another model begin "
        "a new run.",
    )
    if 0 in (past.model.lora.rank, config.model.lora.rank):
        return
    alpha, allowed = config.model.lora.alpha, past.model.lora.alpha
    check(
        alpha == allowed, "model.lora.alpha", alpha,
        f"{allowed:g}, with which the adapters of {config.run.resume} were trained",
        "Leave it, or begin a new run with model.path at the result of `async-rl export`.",
    )


def undo_resume(run_dir: Path) -> None:
    """If the last resume ended before its first step, put back the files that it set aside and remove its own.

    One that was killed between a checkpoint and the log of its step stays, with its config.
    """
    marker = _read_marker(run_dir)
    if marker and _has_gone_on(run_dir, marker):
        config_file(run_dir).replace(run_dir / "config.yaml")
    elif marker:
        _put_back(run_dir, marker)
    _remove_marker(run_dir)


def config_file(run_dir: Path) -> Path:
    """Return the file with the config of a resumed run: config.yaml, as `undo_resume` will leave it."""
    own = run_dir / "config.yaml"
    marker = _read_marker(run_dir)
    if marker is None:
        return own
    found = run_dir / _NEW_CONFIG if _has_gone_on(run_dir, marker) else marker.past_config(run_dir)
    return found if found.exists() else own


def kept_resumes(run_dir: Path) -> int:
    """Return how often a run has been resumed, without a resume that `undo_resume` will undo."""
    marker = _read_marker(run_dir)
    return marker.lineage if marker and not _has_gone_on(run_dir, marker) else _newest_lineage(run_dir)


def _config_of(run_dir: Path, lineage: int) -> Config | None:
    """Return the config of a lineage; None: its file was deleted, or this version of the program refuses it."""
    is_newest = lineage == _newest_lineage(run_dir)
    try:
        return load_config(config_file(run_dir) if is_newest else run_dir / f"config.lineage_{lineage}.yaml")
    except ConfigError:
        return None


def _text(config: Config) -> str:
    """Return the content of config.yaml, which leaves out run.resume."""
    return dump_config(resolve(config, {"run.resume": ""}))


def _remove_marker(run_dir: Path) -> None:
    for name in (RESUMING, _NEW_CONFIG):
        (run_dir / name).unlink(missing_ok=True)


def _read_marker(run_dir: Path) -> _Marker | None:
    """Return what RESUMING says; None: there is none, or a full disk cut it short before anything was set aside."""
    try:
        found = _MARKER.fullmatch((run_dir / RESUMING).read_text())
    except FileNotFoundError:
        return None
    return _Marker(int(found[1]), int(found[2]), bool(found[3])) if found else None


def _newest_lineage(run_dir: Path) -> int:
    """Return how often the run has been resumed, also if what `lineage_of` counts was deleted."""
    return max([lineage_of(run_dir), *map(lineage_of_checkpoint, list_checkpoints(run_dir).values())])


def _has_gone_on(run_dir: Path, marker: _Marker) -> bool:
    """Return whether a resume has made a checkpoint: the run continues from there, also if no step was logged.

    Later checkpoints that it has not set aside yet are of the lineage that ends, or of one before.
    """
    later = (folder for version, folder in list_checkpoints(run_dir).items() if version > marker.version)
    return any(lineage_of_checkpoint(folder) > marker.lineage for folder in later)


def _put_back(run_dir: Path, marker: _Marker) -> None:
    suffix, past_config = marker.suffix, marker.past_config(run_dir)
    if past_config.exists():
        # else they are of before the resume
        own_models = later_models(run_dir, marker.version) if marker.has_moved_models else []
        for file in [*_files_in_use(run_dir), *own_models]:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        past_config.replace(run_dir / "config.yaml")  # of a resume that was killed as it wrote its own
    patterns = (f"*.{suffix}.*", f"{FOLDER}/*.{suffix}", f"{MODELS}/*.{suffix}")
    for file in [found for pattern in patterns for found in run_dir.glob(pattern)]:
        if file.name != f"metrics.{suffix}.jsonl":
            file.rename(file.with_name(file.name.replace(f".{suffix}", "")))
    metrics, discarded = run_dir / "metrics.jsonl", run_dir / f"metrics.{suffix}.jsonl"
    if discarded.exists():
        kept = whole_lines(metrics)
        more = (line for line in whole_lines(discarded) if line not in kept)
        write_whole(metrics, "".join([*kept, *more]))
        discarded.unlink()


def _files_in_use(run_dir: Path) -> list[Path]:
    """Return the files that a resumed run begins anew: the journal with its payload files, the trace and its plot."""
    found = [*run_dir.glob("trajectories.*"), *run_dir.glob("timeline.*")]
    return [file for file in found if ".lineage_" not in file.name]


def whole_lines(file: Path) -> list[str]:
    """Return the lines of a file without the last one if a crash has cut it short."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
