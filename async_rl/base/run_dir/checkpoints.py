"""The checkpoint folders of a run: finds the complete ones and the one to resume from, and removes old ones.

    run_dir/checkpoints/step_40/    a folder has such a name only once it is complete
        *.distcp, .metadata         torch.distributed.checkpoint: weights, optimizer moments, random states
        training_state.json         `TrainingState`, the rest of what a run resumes from, and the files' sizes

learner/loop/checkpointing.py writes and reads the tensors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.base.config import CheckpointConfig, Config
from async_rl.base.errors import ConfigError

FOLDER = "checkpoints"
MODELS = "models"
FORMAT = 4
"""The version of the checkpoint format. Raise it when `TrainingState`, its field `buffer` or the tensors change."""
STATE_FILE = "training_state.json"
RESUMING = ".resuming"
"""A file that exists from the start of a resume until its first step. It contains the suffix of the files set
aside, the version, MODELS, and "named" if run.resume names the checkpoint. Versions of this program that set aside
no models wrote no MODELS."""
_OLD_STATE_FILE = "cut.json"  # of format 1
NAME = re.compile(r"step_(\d+)")
"""The name of a checkpoint's folder."""
_PAST_FILE = re.compile(r"\.lineage_(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The state of learner and buffer after training on `version` batches, before the next batch is chosen."""

    version: int
    lineage: int
    """How often the run had been resumed when the checkpoint was written."""
    ranks: int
    """The number of learner ranks that wrote the checkpoint."""
    networks: dict[str, dict[str, float]]
    """The state of each optimizer besides tensors, for policy and critic by name. See learner/loop/optimizer.py."""
    kl_coef: float
    """The coefficient of algorithm.kl, which an adaptive controller changes during a run."""
    buffer: dict[str, Any]
    """The buffer's state, see buffer/store.py."""


def lineage_of(run_dir: Path) -> int:
    """Return how often the run has been resumed.

    Files that resume number N = 0, 1, ... set aside have lineage_N in their name.

    Each resume leaves a config.lineage_N.yaml. Other such files count too, as the user may have deleted that one.
    """
    files = (file for folder in ("", FOLDER, MODELS) for file in (run_dir / folder).glob("*.lineage_*"))
    found = (_PAST_FILE.search(file.name) for file in files)
    return 1 + max((int(name[1]) for name in found if name), default=-1)


def past_file(run_dir: Path, name: str, lineage: int) -> Path:
    """Return a file or folder of an earlier lineage, which a resume has set aside.

    If the user has deleted it, return the last lineage's. The last lineage began with a copy of what was there at
    its own checkpoint.

    Args:
        name: its name in the run directory, with {lineage} for the number.
    """
    found = run_dir / name.format(lineage=lineage)
    return found if found.exists() else run_dir / name.format(lineage=lineage_of(run_dir) - 1)


def checkpoint_folder(run_dir: Path, version: int) -> Path:
    return run_dir / FOLDER / f"step_{version}"


def model_folder(run_dir: Path, version: int) -> Path:
    """Return the folder of a version's Hugging Face model, written with checkpoint.models_every_steps."""
    return run_dir / MODELS / f"step_{version}"


def run_dir_of_model(folder: Path) -> Path:
    """Return the run directory of RUN_DIR/model or of a version's `model_folder`.

    For any other folder: the one above it.
    """
    is_of_version = folder.parent.name == MODELS and NAME.fullmatch(folder.name)
    return folder.parents[1] if is_of_version else folder.parent


def list_checkpoints(run_dir: Path) -> dict[int, Path]:
    """Return {version: folder} of the complete checkpoints, oldest first."""
    found = {}
    for folder in (run_dir / FOLDER).glob("step_*"):
        if (name := NAME.fullmatch(folder.name)) and _is_complete(folder):
            found[int(name[1])] = folder
    return dict(sorted(found.items()))


def checkpoint_before(run_dir: Path, version: int) -> int | None:
    """Return the version of the newest checkpoint up to `version`.

    If all are newer: the oldest; None if there are none.
    """
    versions = list(list_checkpoints(run_dir))
    return max((v for v in versions if v <= version), default=min(versions, default=None))


def find_checkpoint(path: str | Path, *, resumes: bool = True) -> Path:
    """Return the checkpoint that run.resume means: `path` itself, or the newest one of the run directory `path`.

    The result is absolute, because `run_dir_of` takes the run directory from it. It may be a checkpoint that a resume
    has set aside: that resume may have been killed before its first step, and the next one undoes it.

    Args:
        resumes: whether a run will continue from it. If not, it may also be a checkpoint set aside for good.

    Raises:
        ConfigError: there is no complete checkpoint, one of its files is missing or incomplete, or it is not in a run.
    """
    folder = Path(os.path.abspath(path))
    for named in (folder, _set_aside(folder)):
        if _is_complete(named):
            _check_place(named)
            if resumes:
                _check_in_line(named)
            _check_whole(named)
            return named
    found = list_checkpoints(folder)
    if not found:
        why = f"{folder / FOLDER} holds no complete checkpoint: set checkpoint.every_steps"
        raise ConfigError(
            f"run.resume must be a run directory with a checkpoint, or one of its checkpoints, got {folder}. "
            f"{why if folder.is_dir() else 'There is no such folder'}"
        )
    _check_whole(found[max(found)])
    return found[max(found)]


def _set_aside(folder: Path) -> Path:
    """Return the path to which a resume moves the checkpoint `folder` until the resumed run has made its first step."""
    return folder.parent / f"{folder.name}.{resuming_suffix(folder.parent.parent)}"


def resuming_suffix(run_dir: Path) -> str:
    """Return the suffix of the files set aside by a resume that has not reached its first step; "" if there is none."""
    try:
        return (run_dir / RESUMING).read_text().partition(" ")[0]
    except OSError:
        return ""


def _check_place(folder: Path) -> None:
    """Raise ConfigError if a checkpoint is not in a run directory. Otherwise a resume would take any folder for one."""
    if folder.parent.name != FOLDER:
        raise ConfigError(
            f"run.resume must be a run directory or a checkpoint in RUN_DIR/{FOLDER}, where it was written, got "
            f"{folder}. A run goes on in its own directory: copy all of that, and name the checkpoint in it"
        )


def _check_in_line(folder: Path) -> None:
    """Raise ConfigError if a resume has set a checkpoint aside for good: the run's other files do not continue from it.
    """
    if _PAST_FILE.search(folder.name) and folder.name.partition(".")[2] != resuming_suffix(run_dir_of(folder)):
        raise ConfigError(
            f"run.resume must be a checkpoint of the steps that the run has now, got {folder}: a resume that went back "
            f"to an earlier one has set it aside. Name {folder.parent}/step_N, or begin a new run with its model: "
            f"async-rl export {folder} MODEL_DIR, then model.path=MODEL_DIR"
        )


def _check_whole(folder: Path) -> None:
    """Raise ConfigError if a file of a checkpoint is missing or incomplete.

    The error names the newest complete checkpoint.
    """
    if not (damage := _damage(folder)):
        return
    others = [other for other in reversed(list_checkpoints(run_dir_of(folder)).values()) if not _damage(other)]
    advice = f"Go on from the newest whole one: async-rl train --resume {others[0]}" if others else (
        "No other checkpoint of the run is whole: start a new run"
    )
    raise ConfigError(f"the checkpoint {folder} is damaged: {damage}. {advice}")


def _damage(folder: Path) -> str:
    """Return which file of a checkpoint is missing, has not its original length, or is no JSON; "" if none is damaged.
    """
    try:
        sizes = json.loads((folder / STATE_FILE).read_text()).get("file_bytes", {})
    except FileNotFoundError:  # of format 1
        return ""
    except ValueError as error:
        return f"{STATE_FILE} is not valid JSON ({error})"
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes in place of {size}"
    return ""


def run_dir_of(checkpoint: Path) -> Path:
    return checkpoint.parents[1]


def write_training_state(folder: Path, state: TrainingState) -> None:
    """Write training_state.json: the state, and the sizes of the folder's other files, which must be complete by then.
    """
    sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
    fields = {"format": FORMAT, "file_bytes": sizes, **dataclasses.asdict(state)}
    (folder / STATE_FILE).write_text(json.dumps(fields) + "\n")


def read_training_state(folder: Path) -> TrainingState:
    """Read the `TrainingState` of the checkpoint `folder`.

    Raises:
        ConfigError: another version of this program wrote the checkpoint.
    """
    file = folder / STATE_FILE
    fields = json.loads(file.read_text()) if file.is_file() else {"format": 1}
    if (found := fields.pop("format", None)) != FORMAT:
        raise ConfigError(
            f"the checkpoint {folder} must have format {FORMAT}, got {found}: another version of async-rl wrote it. "
            "Resume with that version, or start a new run with model.path at the result of its `async-rl export`"
        )
    fields.pop("file_bytes", None)
    return TrainingState(**fields)


def lineage_of_checkpoint(folder: Path) -> int:
    """Return how often the run had been resumed when it wrote a checkpoint; -1 if the checkpoint can't be read."""
    try:
        return read_training_state(folder).lineage
    except (OSError, ValueError):  # a ConfigError, of another format, is a ValueError
        return -1


def resumed_training_state(config: Config) -> TrainingState | None:
    """Return the state from which this run resumes, or None for a new run."""
    return read_training_state(Path(config.run.resume)) if config.run.resume else None


def prune(
    run_dir: Path, config: CheckpointConfig, values: Mapping[int, float], needed: Collection[int | None] = ()
) -> None:
    """Remove the checkpoints that neither checkpoint.keep_last nor checkpoint.keep_best keeps.

    Args:
        values: the value of checkpoint.best_by, by version, as far as it is known.
        needed: versions of further checkpoints to keep.
    """
    found = list_checkpoints(run_dir)
    for version in to_remove(list(found), config, values):
        if version not in needed:
            shutil.rmtree(found[version])


def to_remove(versions: Sequence[int], config: CheckpointConfig, values: Mapping[int, float]) -> list[int]:
    """Return those of `versions`, which are all checkpoints, that `prune` removes.

    With keep_best, the oldest checkpoint that is newer than all of `values` is kept until it is measured. Later ones
    are kept only while they are among the keep_last newest, so that the disk does not fill up if the metric is never
    measured.
    """
    kept = set(sorted(versions)[-config.keep_last :])
    if config.keep_best:
        measured = [version for version in versions if version in values]
        kept |= set(sorted(measured, key=lambda v: (values[v], v))[-config.keep_best :])
        kept |= set(sorted(version for version in versions if version > max(values, default=-1))[:1])
    return [version for version in versions if version not in kept]


def _is_complete(folder: Path) -> bool:
    """Whether the folder is a complete checkpoint.

    An older format counts too, so that `read_training_state` refuses it.
    """
    return (folder / STATE_FILE).is_file() or (folder / _OLD_STATE_FILE).is_file()


FILE_NAME = "step_metrics.jsonl"
LEAST_STEPS = 10


class RecentSteps:
    """Keeps the metrics of a run's last steps, which the next checkpoint contains.

    Args:
        kept_s: steps of the last `kept_s` seconds are kept, and at least LEAST_STEPS.
    """

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._steps: deque[tuple[int, float, str]] = deque()
        """(step, time.monotonic() when it was added, line of JSON)"""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Store the metrics of a step. They replace metrics stored for the same step."""
        if self._steps and self._steps[-1][0] == step:
            self._steps.pop()
        now_s = time.monotonic()
        finite = {key: value if math.isfinite(value) else None for key, value in values.items()}
        self._steps.append((step, now_s, json.dumps({"step": step, **finite}) + "\n"))
        while len(self._steps) > LEAST_STEPS and self._steps[0][1] < now_s - self._kept_s:
            self._steps.popleft()

    def text(self) -> str:
        """Return the kept metrics as the content of a file."""
        return "".join(line for _, _, line in self._steps)


def write_step_metrics(folder: Path, text: str) -> None:
    (folder / FILE_NAME).write_text(text)
