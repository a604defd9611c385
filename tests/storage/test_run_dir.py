"""A run that fails before its first step leaves no directory; a later one keeps its directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.config import Config, ModelConfig, RunConfig, TaskConfig
from async_rl.errors import ConfigError, WaitTimeoutError
from async_rl.storage.checkpoints import TrainingState, checkpoint_folder, write_training_state
from async_rl.storage.run_dir import open_run_dir


@pytest.fixture
def config(tmp_path: Path) -> Config:
    task = TaskConfig(name="reasoning_gym/chain_sum")
    return Config(model=ModelConfig(path="x"), task=task, run=RunConfig(dir=str(tmp_path)))


def empty_metrics(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").touch()


def log(run_dir: Path) -> None:
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "rollout-0.log").write_text("it rains\n")


def step(run_dir: Path) -> None:
    log(run_dir)
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n')


@pytest.mark.parametrize(
    ("write", "error", "stays"),
    [
        (empty_metrics, ConfigError("no room"), False), (empty_metrics, WaitTimeoutError("no host"), False),
        (empty_metrics, KeyboardInterrupt(), False), (log, ConfigError("the port is taken"), False),
        (log, WaitTimeoutError("the server did not start"), True), (step, ConfigError("late"), True),
    ],
)
def test_a_new_run_directory_stays_if_it_explains_the_failure(
    config: Config, tmp_path: Path, write: Callable[[Path], None], error: BaseException, stays: bool
) -> None:
    (tmp_path / "run").mkdir()  # of another run
    with pytest.raises(type(error)), open_run_dir(config) as opened:
        write(opened.run_dir)
        raise error
    assert [folder.name for folder in sorted(tmp_path.iterdir())] == ["run", "run-2"][: 1 + stays]


def test_the_directory_of_a_resumed_run_stays_whatever_happens(config: Config, tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path / "run", 1)
    folder.mkdir(parents=True)
    state = TrainingState(version=1, lineage=0, ranks=1, networks={}, kl_coef=0.0, trained_groups=[], buffer={})
    write_training_state(folder, state)
    again = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=str(tmp_path / "run")))
    with pytest.raises(ConfigError, match="no room"), open_run_dir(again):
        raise ConfigError("no room")
    assert (folder / "training_state.json").is_file()
