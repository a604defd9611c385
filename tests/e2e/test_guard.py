"""The guard of a real run goes back, stops at the best version, and pauses until it is answered."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from async_rl.config.loading import load_config
from async_rl.pipeline import run
from async_rl.storage.checkpoints import list_checkpoints
from async_rl.storage.guard_events import open_pause, read_guard_events
from async_rl.telemetry.status import format_status
from benchmarks.marked_command import MarkedCommand, wait_until
from tests.kit.runs import logged

pytestmark = pytest.mark.e2e


def guarded(folder: Path, action: str, *more: str) -> list[str]:
    """Settings by which trouble is found at version 2: two kinds of signals are beyond limits that are near 0.

    The entropy moves the policy, whose answers are all wrong, and most of them are cut off.
    """
    return [
        f"run.dir={folder}", "run.name=guarded", "run.steps=5", "rollout.engine=hf", "eval.size=0",
        "algorithm.kl.kind=k2_loss", "algorithm.kl.coef=0.01", "algorithm.entropy_coef=0.1",
        "checkpoint.every_steps=1", "checkpoint.keep_last=1",
        f"guard.action={action}", "guard.every_steps=1", "guard.kl_per_token_limit=1e-9", "guard.cut_limit=1e-3", *more,
    ]  # fmt: skip


def groups_trained(journal: Path) -> int:
    with sqlite3.connect(journal) as database:
        (count,) = database.execute("select count(*) from uses").fetchone()
        return int(count)


def test_a_run_goes_back_with_a_higher_kl_coefficient_and_then_stops_at_the_best(
    smoke_yaml: Path, tmp_path: Path
) -> None:
    summary = run(load_config(smoke_yaml, guarded(tmp_path, "rollback", "guard.max_rollbacks=1")))
    run_dir = tmp_path / "guarded"
    events = read_guard_events(run_dir)
    assert [(event.kind, event.version, event.back_to) for event in events] == [
        ("rollback", 2, 1), ("resumed", 2, 1), ("stop", 2, 1)
    ]
    assert set(events[0].signals) == {"cut", "kl_per_token"}
    assert summary["model_version"] == 1 and summary["resumes"] == 1 and "model of version 1" in summary["ended"]
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    coefficients = {record["step"]: record["kl/coef"] for record in logged(run_dir) if "kl/coef" in record}
    assert coefficients[1] == 0.01 and coefficients[2] == 0.02
    discarded = [json.loads(line) for line in (run_dir / "metrics.lineage_0.jsonl").read_text().splitlines()]
    assert min(record["step"] for record in discarded) == 2
    assert groups_trained(run_dir / "trajectories.lineage_0.sqlite") >= 8  # those of step 2 as well, 4 a step
    assert (run_dir / "model" / "config.json").is_file()
    assert 1 in list_checkpoints(run_dir), "keep_last alone would have removed it"


@pytest.mark.nightly
def test_a_paused_run_stands_until_it_is_answered_also_after_a_resume(
    smoke_yaml: Path, tmp_path: Path, start: Callable[..., MarkedCommand]
) -> None:
    run_dir = tmp_path / "guarded"
    options = guarded(tmp_path, "pause", "timeouts.pause_s=5")
    command = [sys.executable, "-m", "async_rl.cli"]
    first = subprocess.run([*command, "train", str(smoke_yaml), *options], capture_output=True, text=True, timeout=200)
    assert first.returncode == 0, first.stderr
    assert "waited 5 s (timeouts.pause_s)" in json.loads((run_dir / "summary.json").read_text())["ended"]
    assert open_pause(run_dir)
    again = start("train", "--resume", str(run_dir), "timeouts.pause_s=200")
    wait_until(lambda: "paused by the guard since step 2" in format_status(run_dir), 120, "the run to pause")
    assert "is paused by the guard" in format_status(run_dir)
    shown = subprocess.run([*command, "guard", str(run_dir)], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("step 2: pause: ") and "--go-on | --rollback | --stop" in shown
    subprocess.run([*command, "guard", str(run_dir), "--go-on"], check=True)
    assert again.wait(200) == 0
    assert [event.kind for event in read_guard_events(run_dir)] == ["pause", "go_on"]
    assert json.loads((run_dir / "summary.json").read_text())["steps"] == 5
