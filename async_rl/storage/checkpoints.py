"""The checkpoints of a run as folders: which are complete, which one to resume from, which may be removed.

    run_dir/checkpoints/step_40/    has this name only once it is complete
        *.distcp, .metadata         torch.distributed.checkpoint: weights, optimizer moments, random states
        training_state.json         `TrainingState`: everything else that learner and buffer resume from

learner/checkpointing.py writes and reads the tensors.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.config import CheckpointConfig, Config
from async_rl.errors import ConfigError

FOLDER = "checkpoints"
FORMAT = 2
"""The format of checkpoints: raise it with each change of `TrainingState`, of its field `buffer`, or of the tensors."""
STATE_FILE = "training_state.json"
_OLD_STATE_FILE = "cut.json"  # of format 1
_NAME = re.compile(r"step_(\d+)")
_PAST_CONFIG = re.compile(r"config\.lineage_(\d+)\.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Learner and buffer at one moment: `version` batches are trained, the next one is not chosen."""

    version: int
    lineage: int
    """How often the run had been resumed when this was written."""
    ranks: int
    """Learner ranks that wrote it."""
    networks: dict[str, dict[str, int]]
    """By name (policy, critic): counts of its optimizer, see learner/optimizer.py."""
    kl_coef: float
    """algorithm.kl's coefficient, which an adaptive controller changes during a run."""
    trained_groups: list[list[list[int]]]
    """[use] ranges [first, last] of the ids of the groups trained on more than `use` times."""
    buffer: dict[str, Any]
    """The buffer's part, see buffer/checkpoint.py."""


def lineage_of(run_dir: Path) -> int:
    """How often the run has been resumed. Each resume renames its config: config.lineage_0.yaml, 1 and so on."""
    found = (_PAST_CONFIG.fullmatch(file.name) for file in run_dir.glob("config.lineage_*.yaml"))
    return 1 + max((int(name[1]) for name in found if name), default=-1)


def checkpoint_folder(run_dir: Path, version: int) -> Path:
    return run_dir / FOLDER / f"step_{version}"


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """The complete checkpoints by version, oldest first."""
    found = {}
    for folder in (run_dir / FOLDER).glob("step_*"):
        if (name := _NAME.fullmatch(folder.name)) and _is_complete(folder):
            found[int(name[1])] = folder
    return dict(sorted(found.items()))


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint that `run.resume` names: a checkpoint itself, or a run directory with at least one.

    Returns:
        An absolute path: `step_40`, `.` and `..` don't name the run directory that `run_dir_of` reads from it.

    Raises:
        ConfigError: it is neither.
    """
    folder = Path(os.path.abspath(path))
    if _is_complete(folder):
        return folder
    found = list_checkpoints(folder)
    if not found:
        why = f"{folder / FOLDER} holds no complete checkpoint: set checkpoint.every_steps"
        raise ConfigError(
            f"run.resume must be a run directory with a checkpoint, or one of its checkpoints, got {folder}. "
            f"{why if folder.is_dir() else 'There is no such folder'}"
        )
    return found[max(found)]


def run_dir_of(checkpoint: Path) -> Path:
    return checkpoint.parents[1]


def write_training_state(folder: Path, state: TrainingState) -> None:
    (folder / STATE_FILE).write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(state)}) + "\n")


def read_training_state(folder: Path) -> TrainingState:
    """
    Raises:
        ConfigError: another version of this program wrote the checkpoint.
    """
    file = folder / STATE_FILE
    fields = json.loads(file.read_text()) if file.is_file() else {"format": 1}
    if (found := fields.pop("format", None)) != FORMAT:
        raise ConfigError(
            f"{folder} must have format {FORMAT}, got {found}: another version of async-rl wrote it. "
            "Resume with that one, or begin a new run with model.path at what its `async-rl export` makes of it"
        )
    return TrainingState(**fields)


def resumed_training_state(config: Config) -> TrainingState | None:
    """The state that this run resumes from; None for a new run."""
    return read_training_state(Path(config.run.resume)) if config.run.resume else None


def rename_later(checkpoint: Path, version: int, lineage: int) -> None:
    """Rename the checkpoints after `version`, which a resume from `checkpoint` discards, so that none is resumed from.

    Their data stays. The remains of checkpoints that never became complete are removed.

    Args:
        lineage: the number of the lineage that ends with the resume.
    """
    for partial in checkpoint.parent.glob("step_*.partial"):
        shutil.rmtree(partial)
    for later, folder in list_checkpoints(run_dir_of(checkpoint)).items():
        if later > version:
            folder.rename(folder.with_name(f"{folder.name}.lineage_{lineage}"))


def prune(run_dir: Path, config: CheckpointConfig, values: Mapping[int, float]) -> None:
    """Remove the checkpoints that neither checkpoint.keep_last nor checkpoint.keep_best keeps.

    Args:
        values: checkpoint.best_metric by version, as far as it is known.
    """
    found = list_checkpoints(run_dir)
    for version in to_remove(list(found), config, values):
        shutil.rmtree(found[version])


def to_remove(versions: Sequence[int], config: CheckpointConfig, values: Mapping[int, float]) -> list[int]:
    """Those of the checkpoints `versions` that `prune` removes.

    With keep_best, the oldest checkpoint that is newer than all of `values` stays until it is measured. Those after it
    stay only while they are among the last, so that a metric which never comes does not fill the disk.
    """
    kept = set(sorted(versions)[-config.keep_last :])
    if config.keep_best:
        measured = [version for version in versions if version in values]
        kept |= set(sorted(measured, key=lambda v: (values[v], v))[-config.keep_best :])
        kept |= set(sorted(version for version in versions if version > max(values, default=-1))[:1])
    return [version for version in versions if version not in kept]


def _is_complete(folder: Path) -> bool:
    """Whether the folder is a checkpoint; one of an older format counts, so that `read_training_state` refuses it."""
    return (folder / STATE_FILE).is_file() or (folder / _OLD_STATE_FILE).is_file()
