"""Ends a run early at the driver's own decision, with the model of an earlier checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from async_rl.driver.actor_group import ActorGroup
from async_rl.driver.run_log import RunLog
from async_rl.storage.checkpoints import checkpoint_folder


def end_early(processes: ActorGroup, log: RunLog, reason: str) -> None:
    """Have the learner stop after its step, with a checkpoint; `reason` stands in the summary."""
    log.end_reason = log.ended = reason  # at the end of the run no report of the learner follows that would set it
    for name in [name for name in processes.actors if name.startswith("learner")]:
        processes.actors[name].stop.remote()


def write_model_of(run_dir: Path, version: int, summary: dict[str, Any]) -> None:
    """Write the model of the checkpoint of a version as run_dir/model, and its version into the summary."""
    from learner.models.export import export

    shutil.rmtree(run_dir / "model", ignore_errors=True)  # of a run that was complete and went on
    export(checkpoint_folder(run_dir, version), run_dir / "model")
    summary["model_version"] = version
