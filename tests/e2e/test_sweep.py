"""A whole sweep: its cells are real runs, and it ends with a table and a page."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from async_rl.base.config.loading import text_override
from async_rl.base.run_dir.checkpoints import list_checkpoints
from async_rl.base.telemetry.metrics import read_metrics
from async_rl.tools.sweeps.cells import read_record
from benchmarks.marked_command import MarkedCommand, wait_until

pytestmark = pytest.mark.e2e
FILE = "metrics.jsonl"


def trainer_of(cell: Path, command: MarkedCommand) -> psutil.Process:
    """The process of `async-rl train` of a cell, in a session of its own."""
    (found,) = (each for each in command.processes() if text_override("run.name", cell.name) in each.cmdline())
    return found


def cores_of(trainer: psutil.Process) -> set[int]:
    """The cores on which any thread of a run may be, of its driver and all that this has started."""
    cores: set[int] = set()
    family = [trainer, *trainer.children(recursive=True)]
    titles = " ".join(word for each in family for word in each.cmdline())
    assert all(name in titles for name in ("raylet", "ray::LearnerActor", "ray::RolloutActor", "ray::BufferActor"))
    for process in family:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            cores.update(*(os.sched_getaffinity(thread.id) for thread in process.threads()))
    return cores


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core holds one cell")
def test_two_cells_at_once_have_cores_of_their_own_and_a_killed_one_goes_on(
    smoke_yaml: Path, tmp_path: Path, start: Callable[..., MarkedCommand]
) -> None:
    words = (
        "sweep", str(smoke_yaml), "--staleness", "1", "--seeds", "2", "--parallel", "2", "--name", "s",
        f"run.dir={tmp_path}", "rollout.engine=hf", "run.steps=200", "eval.num_prompts=0", "checkpoint.every_steps=1",
    )  # fmt: skip
    cells = [tmp_path / "s" / "cells" / f"staleness-1.seed-{seed}" for seed in (0, 1)]
    command = start(*words)
    wait_until(lambda: all(list_checkpoints(cell) for cell in cells), 300, "both cells to train")
    killed, other = (trainer_of(cell, command) for cell in cells)
    first, second = cores_of(killed), cores_of(other)
    assert first and second and not first & second
    os.killpg(killed.pid, signal.SIGKILL)
    assert command.wait(400) == 1 and "1 of 2 cells" not in command.text()
    assert "failed: staleness-1.seed-0: exit code -9" in command.text()
    assert read_record(cells[0]) is None
    wait_until(lambda: not command.processes(), 60, "the killed cell's processes to end")
    version = max(list_checkpoints(cells[0]))
    assert 1 <= version < 200

    again = start(*words)
    assert again.wait(400) == 0
    assert f"staleness-1.seed-0 goes on from step {version} on core " in again.text()
    assert "staleness-1.seed-1 starts" not in again.text()
    assert all(read_record(cell) for cell in cells)
    assert [json.loads((cell / "summary.json").read_text())["resumes"] for cell in cells] == [1, 0]
    for cell in cells:
        trained = [record["step"] for record in read_metrics(cell / FILE) if record.get("reward/mean") is not None]
        assert trained == list(range(1, 201))
