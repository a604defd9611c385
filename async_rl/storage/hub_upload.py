"""Uploads the model of a run to the Hugging Face hub, when the run has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from async_rl.config import Config
from async_rl.errors import ConfigError


def check_login(config: Config) -> None:
    """Raise ConfigError if checkpoint.push_to_hub asks for an upload, and this host has no token for the hub."""
    from huggingface_hub import get_token

    if config.checkpoint.push_to_hub and not get_token():
        raise ConfigError(
            f"checkpoint.push_to_hub {config.checkpoint.push_to_hub} needs a token of the hub that may write: log in "
            "with `hf auth login`, or set HF_TOKEN"
        )


def upload_model(config: Config, folder: Path, note: Callable[[str], None]) -> None:
    """Upload `folder` to the repository checkpoint.push_to_hub, if that is set; a new repository is private.

    The run has ended by then, so a failure is noted with what to do, and no error.
    """
    name = config.checkpoint.push_to_hub
    if not name:
        return
    if not folder.is_dir():
        note(f"nothing is uploaded to {name}: there is no {folder} here")
        return
    limit, told = config.timeouts.limit("work_s"), [f"no answer after {config.timeouts.limit('work_s')}"]
    # A thread that ends with the process: huggingface_hub has no time limit for an upload as a whole.
    uploading = threading.Thread(target=_upload, args=(name, folder, config.run.name, told), daemon=True)
    uploading.start()
    uploading.join(limit.seconds)
    if told[-1]:
        note(f"{folder} could not be uploaded to {name}: {told[-1]}. Try again with: hf upload {name} {folder}")
    else:
        note(f"{folder} is on the hub as {name}")


def _upload(name: str, folder: Path, run: str, told: list[str]) -> None:
    """Upload the folder, and append to `told` the reason why that failed, or ""."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message=f"Model of the run {run}")
    except Exception as error:  # whatever the hub and its client do, the run has its model
        told.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
    else:
        told.append("")
