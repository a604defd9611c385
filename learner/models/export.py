"""`async-rl export`: writes the policy of a checkpoint as a Hugging Face folder, for transformers and SGLang."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from async_rl.base.config.loading import load_config
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.fetching import located
from async_rl.base.models_and_data.model_writing import writing
from async_rl.base.run_dir.checkpoints import find_checkpoint, run_dir_of
from async_rl.base.run_dir.resuming import check_newest, config_file
from async_rl.base.weights.checkpoint_names import to_checkpoint
from learner.loop.checkpointing import AVERAGE, check_weights, has_average
from learner.models.network import read_weights
from learner.models.policy import open_policy, whole_parameters, write_folder


def export(source: str | Path, target: Path) -> Path:
    """Write the policy of `source`, a checkpoint or a run with one, to `target`, and return the checkpoint's path.

    The weights are the moving average if the checkpoint has one (learner.ema_decay), as in run_dir/model. They have the
    type of the weights in model.path, and adapters are merged. Other files are copied from model.path.

    Raises:
        ConfigError: there is no checkpoint, it is unclear which of a resumed run's checkpoints is the newest, the run's
            config trains fewer weights, or `target` is not empty or can't be written.
    """
    target = target.resolve()  # "." has no name, which the folder gets once it is complete
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ConfigError(f"{target} must be a new or an empty folder. It holds files that would be lost")
    try:
        checkpoint = find_checkpoint(source, resumes=False)
    except ConfigError as error:  # the message names run.resume, which is not set here
        raise ConfigError(str(error).replace("run.resume", "CHECKPOINT", 1)) from None
    if Path(source).resolve() == run_dir_of(checkpoint).resolve():
        check_newest(run_dir_of(checkpoint))
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)  # so that it fails before weights are read
    config = located(load_config(config_file(run_dir_of(checkpoint))), ["model.path"])
    policy = open_policy(config.model, torch.float32)
    read_weights(policy, policy.lm, "cpu")
    kind = AVERAGE if has_average(checkpoint) else ""
    trained = {f"policy.{name}": p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    check_weights(checkpoint, trained)
    tensors = {f"{name}{kind}": tensor for name, tensor in trained.items()}
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # DCP warns of the missing process group
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    with writing(target):
        write_folder(to_checkpoint(policy.lm, whole_parameters(policy.lm)), Path(config.model.path), target)
    return checkpoint
