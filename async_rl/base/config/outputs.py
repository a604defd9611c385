"""The sections checkpoint and logging of the configuration."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt

from async_rl.base.config.section import checked, section


def _is_repository(name: str) -> bool:
    return re.fullmatch(r"([\w.-]+/[\w.-]+)?", name) is not None


@section("checkpoint")
class CheckpointConfig:
    """The checkpoints: how often learner and buffer are saved in run_dir/checkpoints, as one consistent state, and
    which checkpoints are kept.
    """

    every_steps: NonNegativeInt = 100
    """Learner steps between two checkpoints; one more is saved at the end. 0: only after Ctrl-C or SIGTERM."""
    models_every_steps: NonNegativeInt = 0
    """Learner steps between two Hugging Face folders of the policy, run_dir/models/step_N, which are all kept and which
    training waits for. 0: only run_dir/model, at the end."""
    push_to_hub: Annotated[str, checked(_is_repository, "OWNER/NAME of a repository of the hub")] = ""
    """The repository of the hub, OWNER/NAME, to which run_dir/model is uploaded when the run has ended. It is made,
    as a private one, if there is none. Empty: nothing is uploaded."""
    keep_last: PositiveInt = 2
    """The number of newest checkpoints to keep."""
    keep_best: NonNegativeInt = 0
    """The number of further checkpoints to keep: those that are the best on held-out prompts."""
    best_by: Literal["accuracy", "reward"] = "accuracy"
    """The measure of the best: accuracy, the share of right answers (eval/accuracy), or reward, the mean
    reward (eval/reward)."""


@section("logging")
class LoggingConfig:
    """The loggers that get the metrics besides run_dir/metrics.jsonl: wandb, trackio and TensorBoard."""

    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """The mode of wandb. auto: online when the user is logged in, else disabled."""
    trackio: bool = False
    """Whether the same metrics go to trackio, where it is installed (`pip install trackio`)."""
    tensorboard: bool = False
    """Whether the same metrics go to event files in run_dir/tensorboard (`pip install 'async-rl[tensorboard]'`).
    `tensorboard --logdir RUN_DIR` shows them (`pip install tensorboard`)."""
    project: str = "async-rl"
    """The project in wandb and trackio."""
