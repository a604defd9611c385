"""Prepares the directory of a run for a resume, and puts back what a resume set aside that has made no step."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from async_rl.config import Config
from async_rl.config.loading import dump_config
from async_rl.storage.checkpoints import (
    FOLDER,
    MODELS,
    RESUMING,
    later_models,
    lineage_of,
    list_checkpoints,
    rename_later,
)
from async_rl.storage.whole_file import write_whole

_NAMED = " named"
"""The end of the marker RESUMING of a resume whose checkpoint run.resume names."""


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
    run_dir = config.run_dir
    (run_dir / RESUMING).unlink(missing_ok=True)
    kept = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=""))
    write_whole(run_dir / "config.yaml", dump_config(kept))


def prepare_resume(config: Config, version: int, is_named: bool) -> None:
    """Set aside what the run wrote after the checkpoint of `version`: rename its files, move lines of metrics.jsonl.

    The new names contain the number of the lineage that ends, so that each resume keeps its own files.
    """
    run_dir, lineage = config.run_dir, lineage_of(config.run_dir)
    suffix = f"lineage_{lineage}"
    write_whole(run_dir / RESUMING, f"{suffix} {version} {MODELS}{_NAMED if is_named else ''}")
    rename_later(Path(config.run.resume), version, lineage)
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
    partial.rename(run_dir / f"config.{suffix}.yaml")


def undo_resume(run_dir: Path) -> None:
    """If the last resume ended before its first step, put back what it set aside and remove its own files."""
    marker = run_dir / RESUMING
    if not marker.exists():
        return
    suffix, _, rest = marker.read_text().removesuffix(_NAMED).partition(" ")
    version, _, also = rest.partition(" ")
    if not version.isdigit():  # the disk was full, so that nothing was set aside
        marker.unlink()
        return
    if max(list_checkpoints(run_dir), default=0) > int(version):  # killed between a checkpoint and the log of its step
        marker.unlink()
        return
    if (run_dir / f"config.{suffix}.yaml").exists():
        own_models = later_models(run_dir, int(version)) if also == MODELS else []  # else they are of before the resume
        for file in [*_files_in_use(run_dir), *own_models]:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        (run_dir / f"config.{suffix}.yaml").unlink()
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
    marker.unlink()


def _files_in_use(run_dir: Path) -> list[Path]:
    """Return the files that a resumed run begins anew: the journal with its payload files, the trace and its plot."""
    found = [*run_dir.glob("trajectories.*"), *run_dir.glob("timeline.*")]
    return [file for file in found if ".lineage_" not in file.name]


def whole_lines(file: Path) -> list[str]:
    """Return the lines of a file without the last one if a crash has cut it short."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
