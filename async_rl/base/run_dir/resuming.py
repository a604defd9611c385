"""Prepares the directory of a run for a resume, and restores what a resume without a step has set aside.

A resume that trains no step changes nothing, unless it reaches the end of its run. `open_resumed_run_dir` sets aside
(renames) what was written after the checkpoint. It restores all of that unless a step, or an end of the run, was
logged. If the process is killed before it can, the next resume restores it.

A new run does not load this module.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from async_rl.base.config import Config
from async_rl.base.config.check import check
from async_rl.base.config.loading import load_config
from async_rl.base.config.resolve import Decided, resolve
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import (
    FILE_NAME,
    FOLDER,
    MODELS,
    NAME,
    RESUMING,
    TrainingState,
    find_checkpoint,
    lineage_of,
    lineage_of_checkpoint,
    list_checkpoints,
    read_training_state,
    resuming_suffix,
    run_dir_of,
)
from async_rl.base.run_dir.files import whole_lines, write_whole
from async_rl.base.run_dir.run_dir import (
    INTERRUPTED,
    NEW_CONFIG,
    asked_name,
    config_text,
    locked,
    numbered,
    remove_marker,
)
from async_rl.base.run_dir.watch_events import WATCH_ANSWER

_NAMED = " named"
"""What the marker RESUMING ends with if run.resume names the checkpoint, and not only the run."""
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
        """Return the config file of the lineage that ends. It exists once all files are set aside."""
        return run_dir / f"config.{self.suffix}.yaml"


@contextlib.contextmanager
def open_resumed_run_dir(config: Config, decided: Decided, resume: str) -> Iterator[Decided]:
    """Lock the directory of the run that `resume` names, prepare it, and yield the decided settings of the resumed run.

    Raises:
        ConfigError: `resume` names no checkpoint, or its run is complete or is locked by another process, or the disk
            has no file locks.
    """
    with locked(run_dir_of(find_checkpoint(resume))), _resumed(config, decided, resume) as resumed:
        yield resumed


@contextlib.contextmanager
def _resumed(config: Config, decided: Decided, resume: str) -> Iterator[Decided]:
    """Set aside the files written after the checkpoint, and yield the decided settings of the resumed run.

    If the block ends without a logged step, the files are restored. If the run was cut short after its last step, only
    its end is left to do.

    Raises:
        ConfigError: the checkpoint is of run.steps or later and the run is complete, or the run began with another
            model.path or model.lora.alpha.
    """
    checkpoint = find_checkpoint(resume)
    run_dir = run_dir_of(checkpoint)
    (run_dir / WATCH_ANSWER).unlink(missing_ok=True)  # to the run before; one that comes while this run starts stays
    undo_resume(run_dir)  # of a resume that was killed before its first step
    is_named = Path(os.path.abspath(resume)) != run_dir
    if not checkpoint.exists():  # that resume had set it aside
        checkpoint = checkpoint.with_name(checkpoint.name.partition(".")[0])
    # that resume may have set aside the newest, or the named one for good
    checkpoint = find_checkpoint(checkpoint if is_named else run_dir)
    saved = read_training_state(checkpoint)
    version = saved.version
    if version > config.run.steps or (version == config.run.steps and is_complete(run_dir, config)):
        raise ConfigError(
            f"run.steps must be above {version}, the version of {checkpoint}, got {config.run.steps}. "
            f"Set run.steps={2 * version} to train on"
        )
    place = {"run.dir": str(run_dir.parent), "run.name": run_dir.name, "run.resume": str(checkpoint)}
    decided = {**decided, **place}
    settings = resolve(config, decided)
    check_origin(settings, saved)
    try:
        prepare_resume(settings, saved, is_named)
        yield decided
    finally:
        undo_resume(run_dir)


def find_run(config: Config) -> Path | None:
    """Return the run directory that `--resume auto` continues, or None if a new run starts.

    Candidates are the directory of run.name and numbered ones, NAME-2 and so on, made because the name was taken. The
    last one with a checkpoint or an end is chosen. A directory whose own run.name ends in such a number is another run.
    So is one after a gap in the numbers, unless it records that it was made for this name.
    """
    found = None
    for place, number in enumerate(_numbers(config), 1):
        candidate = numbered(config, number)
        asked, is_behind_gap = asked_name(candidate), number > place
        is_of_name = number == 1 or asked == config.run.name or not (asked or is_behind_gap)
        if is_of_name and (list_checkpoints(candidate) or is_complete(candidate, config)):
            found = candidate
    return found


def _numbers(config: Config) -> list[int]:
    """Return the numbers of the existing directories for a run's name, in order.

    The directory run.name has the number 1.
    """
    parent, name = config.run_dir.parent, re.compile(re.escape(config.run.name) + r"(?:-([1-9]\d*))?")
    found = (name.fullmatch(path.name) for path in parent.iterdir()) if parent.is_dir() else ()
    return sorted(int(each[1] or 1) for each in found if each and each[1] != "1")


def is_complete(run_dir: Path, config: Config) -> bool:
    """Return whether a run has ended with a summary, so that nothing is left to train.

    It may have ended after run.steps steps, or earlier: by run.seconds, by the watcher, by the user's training program,
    or because nothing was left to learn. A run is not complete if it was interrupted, if the watcher rolls it back, if
    it continued after its summary or from an earlier checkpoint, or if it ended without a step.
    """
    file = run_dir / "summary.json"
    summary = json.loads(file.read_text()) if file.is_file() else {INTERRUPTED: True}
    if INTERRUPTED in summary or "rolled_back" in summary:
        return False
    resumes = kept_resumes(run_dir)
    is_newest_end = summary.get("resumes", resumes) >= resumes
    has_gone_on = max(list_checkpoints(run_dir), default=0) > summary["steps"]
    if summary["steps"] >= config.run.steps:
        return is_newest_end or has_gone_on
    has_its_reason = summary["steps"] > 0 and ("ended" in summary or config.run.seconds > 0)
    return has_its_reason and is_newest_end and not has_gone_on


def resuming_since_s(run_dir: Path) -> float | None:
    """Return when a resume started that has not reached its first step, in time.time(); None if there is none.

    The resume may be running, or may have been killed before that step.
    """
    try:
        return (run_dir / RESUMING).stat().st_mtime
    except OSError:
        return None


def resumes_named_checkpoint(run_dir: Path) -> bool:
    """Return whether run.resume of a resume before its first step names a checkpoint, and not only the run."""
    try:
        return (run_dir / RESUMING).read_text().endswith(_NAMED)
    except OSError:
        return False


def prepare_resume(config: Config, saved: TrainingState, is_named: bool) -> None:
    """Set aside what the run wrote after the checkpoint: rename its files, and move lines of metrics.jsonl.

    The new names contain the number of the lineage that ends, so that each resume keeps its own files. That is the
    largest number in any file's name, a checkpoint or summary.json, because the user may have deleted some of them.

    Args:
        saved: the state in the checkpoint.
        is_named: run.resume names the checkpoint, and not only the run.
    """
    run_dir, version, summary = config.run_dir, saved.version, config.run_dir / "summary.json"
    told = json.loads(summary.read_text()).get("resumes", 0) if summary.is_file() else 0
    marker = _Marker(max(_newest_lineage(run_dir), told), version, has_moved_models=True)
    suffix = marker.suffix
    write_whole(run_dir / RESUMING, f"{suffix} {version} {MODELS}{_NAMED if is_named else ''}")
    write_whole(run_dir / NEW_CONFIG, config_text(config))
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

    Nothing is checked if the config of the checkpoint's lineage is missing or can't be read.

    Args:
        saved: the state in the checkpoint.

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
    """Undo a resume that ended before its first step: restore the files that it set aside, and remove its own.

    A resume that has written a checkpoint is kept, with its config, even if it logged no step.
    """
    marker = _read_marker(run_dir)
    if marker and _has_gone_on(run_dir, marker):
        config_file(run_dir).replace(run_dir / "config.yaml")
    elif marker:
        _put_back(run_dir, marker)
    remove_marker(run_dir)


def config_file(run_dir: Path) -> Path:
    """Return the file with the config of a run: what config.yaml will be after `undo_resume`."""
    own = run_dir / "config.yaml"
    marker = _read_marker(run_dir)
    if marker is None:
        return own
    found = run_dir / NEW_CONFIG if _has_gone_on(run_dir, marker) else marker.past_config(run_dir)
    return found if found.exists() else own


def kept_resumes(run_dir: Path) -> int:
    """Return how often a run has been resumed, not counting a resume that `undo_resume` will undo."""
    marker = _read_marker(run_dir)
    return marker.lineage if marker and not _has_gone_on(run_dir, marker) else _newest_lineage(run_dir)


def _config_of(run_dir: Path, lineage: int) -> Config | None:
    """Return the config of a lineage; None if its file was deleted, or this version of the program refuses it."""
    is_newest = lineage == _newest_lineage(run_dir)
    try:
        return load_config(config_file(run_dir) if is_newest else run_dir / f"config.lineage_{lineage}.yaml")
    except ConfigError:
        return None


def _read_marker(run_dir: Path) -> _Marker | None:
    """Return the content of RESUMING; None if there is none, or a full disk cut it short before anything was set aside.
    """
    try:
        found = _MARKER.fullmatch((run_dir / RESUMING).read_text())
    except FileNotFoundError:
        return None
    return _Marker(int(found[1]), int(found[2]), bool(found[3])) if found else None


def _newest_lineage(run_dir: Path) -> int:
    """Return how often the run has been resumed, even if the files that `lineage_of` counts were deleted."""
    return max([lineage_of(run_dir), *map(lineage_of_checkpoint, list_checkpoints(run_dir).values())])


def _has_gone_on(run_dir: Path, marker: _Marker) -> bool:
    """Return whether a resume has written a checkpoint. Then the run continues from it, even if no step was logged.

    Other checkpoints after marker.version, which the resume has not set aside yet, belong to earlier lineages.
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
    """Return the files that a resumed run starts anew: the journal with its payload files, the trace and its plot."""
    found = [*run_dir.glob("trajectories.*"), *run_dir.glob("timeline.*")]
    return [file for file in found if ".lineage_" not in file.name]


def rename_later(checkpoint: Path, version: int, lineage: int) -> None:
    """Rename checkpoints and models newer than `version` to step_N.lineage_L, because a resume discards them.

    No run resumes from a folder with such a name. Incomplete checkpoints are removed.

    Args:
        checkpoint: the checkpoint from which the run resumes.
        lineage: L, the number of the lineage that ends with the resume.
    """
    for partial in checkpoint.parent.glob("step_*.partial"):
        shutil.rmtree(partial)
    run_dir = run_dir_of(checkpoint)
    checkpoints = [folder for each, folder in list_checkpoints(run_dir).items() if each > version]
    for folder in [*checkpoints, *later_models(run_dir, version)]:
        folder.rename(folder.with_name(f"{folder.name}.lineage_{lineage}"))


def later_models(run_dir: Path, version: int) -> list[Path]:
    """Return the Hugging Face folders of versions above `version`, except those that a resume has set aside."""
    found = ((NAME.fullmatch(folder.name), folder) for folder in (run_dir / MODELS).glob("step_*"))
    return [folder for name, folder in found if name and int(name[1]) > version]


def check_newest(run_dir: Path) -> None:
    """Raise ConfigError if a resume that has not reached its first step has set aside later checkpoints.

    If the resume is running, its first step discards them. If it was killed, the next one restores them.
    """
    suffix = resuming_suffix(run_dir)
    later = [folder.name for folder in (run_dir / FOLDER).glob(f"step_*.{suffix}")] if suffix else []
    if later:
        newest = max(later, key=lambda name: int(name.removeprefix("step_").partition(".")[0]))
        raise ConfigError(
            f"{run_dir / RESUMING} says that a resume of the run has not come to its first step, or was killed before: "
            f"that decides whether its newest checkpoint is {newest}. Name one of those in {run_dir / FOLDER}, or "
            f"go on with the run first: async-rl train --resume {run_dir}"
        )


RESTORED = "log/restored"
"""A metric, always 1, that marks a step whose record was restored from a checkpoint."""


def missing_steps(logged: Sequence[Mapping[str, float | None]], version: int) -> list[int]:
    """Return the steps up to `version` that have no record in `logged`, the records of metrics.jsonl."""
    found = {record["step"] for record in logged if record.get("time/written_at_s") is not None}
    return [step for step in range(1, version + 1) if step not in found]


def restored_records(
    checkpoint: Path, steps: Sequence[int], logged: Sequence[Mapping[str, float | None]]
) -> list[dict[str, float | None]]:
    """Return the records of those `steps` whose metrics the checkpoint's folder contains, in order.

    They lack what only the driver knows: the metrics of rollout workers, and utilisation. `time/written_at_s` continues
    from the last record in `logged`, plus the time of each step. `time/since_first_step_s` is 0 at step 1, whose
    warm-up counts in no time of the run, and missing at the others.
    """
    file = checkpoint / FILE_NAME
    lines = file.read_text().splitlines() if file.is_file() else []
    kept = {record["step"]: record for record in map(json.loads, lines)}
    written_at_s = max((record.get("time/written_at_s") or 0.0 for record in logged), default=0.0)
    found = []
    for step in steps:
        if record := kept.get(step):
            written_at_s += record.get("time/step_s") or 0.0
            began = {"time/since_first_step_s": 0.0} if step == 1 else {}
            found.append({**record, **began, "time/written_at_s": round(written_at_s, 3), RESTORED: 1.0})
    return found


def numbers_text(steps: Sequence[int]) -> str:
    """Return ascending step numbers as text with ranges, e.g. `3, 7 to 9`."""
    parts: list[str] = []
    first = last = steps[0]
    for step in [*steps[1:], math.inf]:
        if step == last + 1:
            last = int(step)
            continue
        parts.append(f"{first}" if first == last else f"{first} to {last}")
        first = last = step  # type: ignore[assignment]
    return ", ".join(parts)
