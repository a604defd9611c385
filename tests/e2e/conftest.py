from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks.marked_command import MarkedCommand
from tests.tiny_folder import save_tiny_model


@pytest.fixture(scope="session")
def smoke_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 4 steps on an untrained tiny model, small enough for a few seconds of work."""
    folder = tmp_path_factory.mktemp("smoke")
    save_tiny_model("tiny-qwen2", folder / "model", seed=0)
    tree = {
        "run": {"name": "smoke", "dir": str(folder / "runs"), "steps": 4},
        "model": {"path": str(folder / "model")},
        "task": {
            "name": "reasoning_gym/spell_backward", "params": {"min_word_len": 3, "max_word_len": 5}, "size": 200,
            "max_prompt_tokens": 80,
        },
        "rollout": {"group_size": 4, "max_response_tokens": 12},
        "learner": {"prompts_per_step": 4, "lr": 1e-3, "max_tokens_per_microbatch": 1024},
        "algorithm": {"filter_zero_variance": False},  # an untrained model gets every answer wrong
        "eval": {"size": 8},
        "logging": {"wandb": "disabled"},
    }
    path = folder / "smoke.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., MarkedCommand]]:
    commands: list[MarkedCommand] = []

    def run(*arguments: str) -> MarkedCommand:
        commands.append(MarkedCommand(list(arguments), tmp_path / f"command-{len(commands)}.log"))
        return commands[-1]

    yield run
    for command in commands:
        command.kill()
