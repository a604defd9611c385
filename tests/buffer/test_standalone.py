"""`async-rl buffer` as a person starts it."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.cli import main
from async_rl.config.loading import load_config
from async_rl.storage.run_dir import open_buffer_dir
from buffer.client import LearnerClient, WorkerClient
from tests.buffer.factories import make_group
from tests.buffer.running import TIMEOUTS, with_worker

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


class Alone:
    """The command, with its output line by line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "async_rl.cli", "buffer", *arguments], cwd=ROOT, text=True, bufsize=1,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def line_with(self, text: str) -> str:
        """The next such line, within 30 s for each line."""
        while text not in (line := self._lines.get(timeout=30.0)):
            pass
        return line

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(line)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    command = Alone(
        "rollout.group_size=2", "learner.prompts_per_step=4", "algorithm.filter_zero_variance=false",
        f"run.dir={tmp_path}", "--every-s", "0.1",
    )
    yield command
    command.close()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_a_standalone_buffer_serves_and_ends_in_order(alone: Alone, ending: signal.Signals, tmp_path: Path) -> None:
    found = re.search(r"tcp://\S+", alone.line_with("buffer at "))
    assert found
    learner = LearnerClient(found[0], TIMEOUTS)
    learner.served(0)

    async def put_three(worker: WorkerClient) -> None:
        for slot in (await worker.admit(4))[:3]:
            await worker.put(make_group(slot))

    with_worker(found[0], put_three)
    learner.close()
    assert [folder.name for folder in tmp_path.iterdir()] == ["buffer"]
    assert "admitted 4  trained 0  running 1  depth 3  held 0  slots_held 4  refused 0" in alone.line_with("depth 3")
    alone.process.send_signal(ending)
    assert "buffer/dropped_shutdown 4" in alone.line_with("ended in order")
    assert alone.process.wait(10) == 0


def test_a_folder_in_use_or_of_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["buffer", f"run.dir={tmp_path}"]
    config = load_config(None, [f"run.dir={tmp_path}", "run.name=buffer", "model.path=x", "task.name=reasoning_gym/x"])
    with open_buffer_dir(config):
        assert main(command) == 2
        assert f"{tmp_path}/buffer is locked by another run or buffer that is still" in capsys.readouterr().err
    with open_buffer_dir(config):
        pass  # the lock is free again
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    assert main([*command, "run.name=run"]) == 2
    assert "run.name must name a new folder or that of a buffer alone, got run" in capsys.readouterr().err
    assert not list(tmp_path.glob("*/trajectories.sqlite*"))
    (tmp_path / "file").touch()
    assert main([*command, "run.name=file"]) == 2
    assert "run.dir, run.name: " in (said := capsys.readouterr().err) and "can't be created: File exists" in said


@pytest.mark.parametrize("every_s", ["0", "-1", "nan", "inf"])
def test_an_interval_that_is_not_positive_is_refused(
    every_s: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["buffer", f"run.dir={tmp_path}", "--every-s", every_s]) == 2
    assert f"--every-s must be above 0, at most 1000000, got {float(every_s)}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_buffer_without_a_journal_takes_no_folder(tmp_path: Path) -> None:
    names = ["run.name=buffer", "model.path=x", "task.name=reasoning_gym/x", "buffer.journal=false"]
    config = load_config(None, [f"run.dir={tmp_path}", *names])
    with open_buffer_dir(config), open_buffer_dir(config):
        assert not list(tmp_path.iterdir())
