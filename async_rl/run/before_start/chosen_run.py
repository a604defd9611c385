"""Determines the run that `async-rl train` or `TrainingRun` starts or continues, and its configuration."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config, text_override
from async_rl.base.errors import ConfigError
from async_rl.base.run_dir.checkpoints import find_checkpoint, run_dir_of

Configuration = Config | str | Path | Mapping[str, Any]
"""A Config, the path of a YAML file, or settings in the form of such a file: {"model": {"path": ...}, ...}."""


def config_to_start(
    config: Configuration | None, overrides: Sequence[str] = (), resume: str | Path = ""
) -> tuple[Config, Path | None]:
    """Return the Config of the run to start or continue, and its run directory if resume="auto" finds it complete.

    Args:
        config, overrides, resume: as for `TrainingRun` in async_rl/api.py.

    Returns:
        (Config, run directory of the complete run or None).

    Raises:
        ConfigError: there is neither a configuration nor a run to continue, or a setting can't work.
    """
    resume = os.path.expanduser(resume)
    if config is None:
        if resume in ("", "auto"):
            allowed = "a YAML file, settings or a Config, or None with resume=RUN_DIR, whose config.yaml is taken"
            got = "got None" + f" with resume={resume!r}" * bool(resume)
            raise ConfigError(f"config must be {allowed}, {got}. `async-rl init` writes a file to begin with")
        from async_rl.base.run_dir.resuming import config_file

        config = config_file(run_dir_of(find_checkpoint(resume)))
    if resume == "auto":
        from async_rl.base.run_dir.resuming import find_run, is_complete

        wanted = config_of(config, overrides)
        found = find_run(wanted)
        if found and is_complete(found, wanted):
            return wanted, found
        resume = str(found or "")
    return config_of(config, [*overrides, *([text_override("run.resume", resume)] if resume else [])]), None


def nothing_left(config: Config, run_dir: Path) -> str:
    """Return the message about a run that `config_to_start` finds complete."""
    summary = json.loads((run_dir / "summary.json").read_text())
    if summary["steps"] >= config.run.steps:
        return f"{run_dir} has its {config.run.steps} steps: nothing is left to train"
    reason = summary.get("ended", f"run.seconds is {config.run.seconds:g}")
    return (
        f"{run_dir} has ended after {summary['steps']} steps: {reason.rstrip('.')}. Nothing is left to train; "
        f"`async-rl train --resume {run_dir}` goes on all the same"
    )


def config_of(config: Configuration, overrides: Sequence[str] = ()) -> Config:
    """Return a Config with overrides applied, loading it from a file or settings if necessary."""
    if not isinstance(config, Config):
        return load_config(config, overrides)
    return load_config(dataclasses.asdict(config), overrides) if overrides else config
