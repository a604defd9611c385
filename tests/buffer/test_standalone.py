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

from buffer.client import LearnerClient, WorkerClient
from tests.buffer.made import make_group
from tests.buffer.running import TIMEOUTS, with_worker

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
def test_the_buffer_serves_alone_and_ends_in_order(alone: Alone, ending: signal.Signals) -> None:
    found = re.search(r"tcp://\S+", alone.line_with("buffer at "))
    assert found
    learner = LearnerClient(found[0], TIMEOUTS)
    learner.served(0)

    async def put_three(worker: WorkerClient) -> None:
        for slot in (await worker.admit(4))[:3]:
            await worker.put(make_group(slot))

    with_worker(found[0], put_three)
    learner.close()
    assert "admitted 4  trained 0  running 1  depth 3  held 0  slots_held 4  refused 0" in alone.line_with("depth 3")
    alone.process.send_signal(ending)
    assert "buffer/dropped_shutdown 4" in alone.line_with("ended in order")
    assert alone.process.wait(10) == 0
