"""A wall clock that is set while a run goes on: the run and its log do not notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.base.telemetry.metrics import read_metrics
from benchmarks.marked_command import MarkedCommand, wait_until

pytestmark = pytest.mark.e2e

SITECUSTOMIZE = """
import os, time
_now_s, _file = time.time, os.environ["CLOCK_FILE"]

def _set_time():
    with open(_file) as file:
        return _now_s() + float(file.read())

time.time = _set_time
"""
"""Runs in every process of the command: time.time() is off by the number in a file, as if the clock was set."""


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_clock_that_is_set_stops_neither_the_run_nor_its_log(smoke_yaml: Path, tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    clock, run_dir = tmp_path / "clock", tmp_path / "r"

    def set_clock(offset_s: int) -> None:
        (tmp_path / "partial").write_text(str(offset_s))
        (tmp_path / "partial").replace(clock)  # a process may read it meanwhile

    set_clock(0)
    command = MarkedCommand(
        [
            "train", str(smoke_yaml), f"run.dir={tmp_path}", "run.name=r", "run.steps=10000", "rollout.engine=hf",
            "staleness.max=1", "eval.num_prompts=0", "run.seconds=3600",
        ],
        tmp_path / "log",
        environment={"CLOCK_FILE": str(clock), "PYTHONPATH": f"{tmp_path / 'site'}:{Path.cwd()}"},
    )  # fmt: skip

    def logged() -> int:
        return len(read_metrics(run_dir / "metrics.jsonl")) if (run_dir / "metrics.jsonl").exists() else 0

    def goes_on(steps: int) -> None:
        wanted = logged() + steps
        wait_until(lambda: logged() >= wanted or command.process.poll() is not None, 200, f"step {wanted}")
        assert command.process.poll() is None, command.text()[-3000:]

    try:
        goes_on(3)
        for offset_s in (-7200, 864_000, -31_536_000):
            set_clock(offset_s)
            goes_on(5)
        command.interrupt()
        assert command.wait(120) == 130
    finally:
        command.kill()
    steps = read_metrics(run_dir / "metrics.jsonl")
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    assert all((step["time/step_s"] or 0) < 200 for step in steps)
    assert all("utilisation/learner" in step and "utilisation/rollout" in step for step in steps[1:])
