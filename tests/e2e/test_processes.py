"""Runs from the command line: a crash, and two runs on one host. test_resume.py interrupts runs."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.marked_command import MarkedCommand, wait_until

pytestmark = pytest.mark.e2e

Start = Callable[..., MarkedCommand]


def metrics_lines(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_two_runs_of_one_name_share_a_host(smoke_yaml: Path, tmp_path: Path, start: Start) -> None:
    """One run has a real SGLang server; the other must not touch its ports and child processes."""
    commands = [
        start("train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=twin", f"rollout.engine={engine}")
        for engine in ("sglang", "hf")
    ]
    assert [command.wait(240) for command in commands] == [0, 0], [c.log.read_text()[-2000:] for c in commands]
    assert (tmp_path / "twin" / "summary.json").exists()
    assert (tmp_path / "twin-2" / "summary.json").exists()


@pytest.mark.parametrize(
    ("victim", "expected"), [("sglang", "rollout"), ("buffer", "buffer")]  # a learner rank's: test_resume.py
)
def test_the_first_crash_ends_the_run_and_is_named(
    smoke_yaml: Path, tmp_path: Path, start: Start, victim: str, expected: str
) -> None:
    engine = "sglang" if victim == "sglang" else "hf"
    command = start(
        "train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=crash", "run.steps=10000",
        f"rollout.engine={engine}", "buffer.journal=false", "placement.rollout.max_restarts=0",
    )
    wait_until(lambda: metrics_lines(tmp_path / "crash") > 2, 180, "two steps")
    find_victim(command, victim).send_signal(signal.SIGKILL)
    assert command.wait(60) == 1
    text = command.log.read_text()
    assert "async-rl: error:" in text
    assert expected in text.split("async-rl: error:")[1]
    assert "Traceback" not in text
    wait_until(lambda: not command.processes(), 10, "every process of the run to end")


def find_victim(command: MarkedCommand, victim: str) -> psutil.Process:
    words = {"sglang": "sglang::scheduler", "buffer": "BufferActor"}[victim]
    for process in command.processes():
        if words in " ".join(process.cmdline()) or words in process.name():
            return process
    raise AssertionError(f"no {words} among {[' '.join(p.cmdline())[:80] for p in command.processes()]}")
