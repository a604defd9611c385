"""Adds texts and ground truths to the rows of `async-rl export-trajectories`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config, read_yaml
from async_rl.base.config.resolve import resolve
from async_rl.base.errors import ConfigError
from async_rl.base.models_and_data.fetching import located
from async_rl.base.models_and_data.model_folder import has_tokenizer, load_tokenizer
from async_rl.base.types import Prompt
from rollout_server.tasks.base import open_task


class TrajectoryTexts:
    """Fills in prompt_text, response_text and ground_truth of exported rows, with the run's newest configuration.

    The journal has no ground truths, and a resume may have changed the task or the order of its questions. So a row
    gets a ground truth only if the task's prompt with the row's index is still the row's prompt.
    """

    def __init__(self, run_dir: Path) -> None:
        config = _with_tokenizer(load_config(run_dir / "config.yaml"), run_dir / "model")
        self._tokenizer = load_tokenizer(config.model.path)
        self._task = open_task(config, self._tokenizer)
        self._has_one_task = _num_tasks(run_dir) == 1
        self.num_without = 0
        """The number of rows without a ground truth so far."""

    def add(self, row: dict[str, Any]) -> None:
        """Fill in the three columns of a row. The texts are None if the journal has deleted the tokens."""
        prompt = self._task.prompt(row["prompt_index"])
        if self._is_of(row, prompt):
            truth = prompt.question.ground_truth
            row["ground_truth"] = truth if isinstance(truth, str) else json.dumps(truth, default=str)
        else:
            row["ground_truth"] = None
            self.num_without += 1
        for text, tokens in (("prompt_text", "prompt_tokens"), ("response_text", "tokens")):
            row[text] = self._tokenizer.decode(row[tokens]) if tokens in row else None

    def _is_of(self, row: dict[str, Any], prompt: Prompt) -> bool:
        """Return whether a row answers this prompt: both have the same prompt tokens.

        If the tokens are deleted, or the episode has turns, both must have the same `data_row`, and the run's task must
        never have changed.
        """
        if row["data_row"] not in (-1, prompt.data_row):
            return False
        if "prompt_tokens" in row and not row["turns"]:
            return list(row["prompt_tokens"]) == prompt.tokens.tolist()
        return self._has_one_task and row["data_row"] == prompt.data_row


def _with_tokenizer(config: Config, own: Path) -> Config:
    """Return the configuration with model.path set to a folder that has the run's tokenizer.

    Args:
        own: the folder of the model in the run directory. It is preferred: a copied run may lack the model.path.
    """
    if has_tokenizer(own):
        return resolve(config, {"model.path": str(own)})
    config = located(config, ["model.path"])
    folders = (Path(config.model.path), own)
    if not has_tokenizer(folders[0]):
        said = ["holds none" if folder.is_dir() else "does not exist" for folder in folders]
        raise ConfigError(
            "--text needs the run's tokenizer in model.path or in RUN_DIR/model, got "
            f"{'; '.join(f'{folder}, which {why}' for folder, why in zip(folders, said, strict=True))}. "
            "Copy the folder of the model to one of them"
        )
    return config


def _num_tasks(run_dir: Path) -> int:
    """Return how many different tasks, with task.* and run.seed, the run and its resumes had."""
    found = set()
    for file in (run_dir / "config.yaml", *run_dir.glob("config.lineage_*.yaml")):
        settings = read_yaml(file.read_text(encoding="utf-8"))[0] or {}
        found.add(json.dumps([settings.get("task"), settings.get("run", {}).get("seed")], default=str))
    return len(found)
