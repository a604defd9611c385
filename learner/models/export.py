"""`async-rl export`: writes the policy of a checkpoint as a Hugging Face folder, for transformers and SGLang."""

from __future__ import annotations

from pathlib import Path

import torch

from async_rl.config.loading import load_config
from async_rl.errors import ConfigError
from async_rl.storage.checkpoints import find_checkpoint, run_dir_of
from learner.checkpointing import load_unsharded, policy_tensors
from learner.models.lora import merged_parameters
from learner.models.policy import load_policy, partial_folder, write_folder


def export(source: str | Path, target: Path) -> Path:
    """Write the policy of `source`, a checkpoint or a run with one, to `target`, and return the checkpoint's path.

    Weights get the type of those of model.path, and adapters are merged into them. Tokenizer, chat template and
    generation config are copied from model.path. One process on the CPU reads the shards of any number of ranks.

    Raises:
        ConfigError: there is no checkpoint, or `target` holds something already or can't be created.
    """
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise ConfigError(f"{target} must be a new or an empty folder. It holds files that would be lost")
    try:
        checkpoint = find_checkpoint(source)
    except ConfigError as error:  # the message names run.resume, which is not set here
        raise ConfigError(str(error).replace("run.resume", "CHECKPOINT", 1)) from None
    try:
        partial_folder(target).mkdir(parents=True, exist_ok=True)  # so that it fails before weights are read
    except OSError as error:
        raise ConfigError(f"{target} can't be created: {error.strerror}. Name a folder that you can write") from None
    config = load_config(run_dir_of(checkpoint) / "config.yaml")
    policy = load_policy(config.model, torch.device("cpu"), torch.float32)
    load_unsharded(policy_tensors(policy), checkpoint)
    write_folder(merged_parameters(policy.lm), Path(config.model.path), target)
    return checkpoint
