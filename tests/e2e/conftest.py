from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from learner.tiny_model import save_tiny_model

ROOT = Path(__file__).parents[2]
MARK = "ASYNC_RL_TEST_MARK"


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


def marked_processes(mark: str) -> list[psutil.Process]:
    """Every live process that carries the mark in its environment, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"the test waited {timeout_s:.0f} s for {what}"
        time.sleep(0.1)


class Command:
    """`async-rl ...` as a person starts it, in a process group of its own, its processes findable by a mark."""

    def __init__(self, arguments: list[str], log: Path) -> None:
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "async_rl.cli", *arguments], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, MARK: self.mark}, start_new_session=True,
            )

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, timeout_s: float) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s; log:\n{self.log.read_text()[-3000:]}") from None

    def processes(self) -> list[psutil.Process]:
        return marked_processes(self.mark)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    commands: list[Command] = []

    def run(*arguments: str) -> Command:
        commands.append(Command(list(arguments), tmp_path / f"command-{len(commands)}.log"))
        return commands[-1]

    yield run
    for command in commands:
        for process in command.processes():
            process.kill()
