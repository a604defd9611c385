"""The files that a run has written, and checkpoints without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.base.run_dir.checkpoints import TrainingState, checkpoint_folder, write_training_state


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, without a line that is still being written; none if there is no file yet."""
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return list(map(json.loads, text[: text.rfind("\n") + 1].splitlines()))


def training_state(version: int, **changes: Any) -> TrainingState:
    fields = {"lineage": 0, "ranks": 1, "networks": {}, "kl_coef": 0.0, "buffer": {}}
    return TrainingState(version=version, **{**fields, **changes})


def make_checkpoint(run_dir: Path, version: int, **changes: Any) -> Path:
    """Make a checkpoint of a version that has no weights; return its folder."""
    folder = checkpoint_folder(run_dir, version)
    folder.mkdir(parents=True)
    write_training_state(folder, training_state(version, **changes))
    return folder
