"""Metrics of steps that were trained but not logged when the driver was killed."""

from __future__ import annotations

import json
import math
from pathlib import Path

from async_rl.base.run_dir.checkpoints import (
    LEAST_STEPS,
    RecentSteps,
    write_step_metrics,
)
from async_rl.base.run_dir.resuming import missing_steps, restored_records


def test_the_last_steps_are_kept_and_a_step_once() -> None:
    recent = RecentSteps(kept_s=0.0)
    for step in range(1, 31):
        recent.add(step, {"reward/mean": 0.0})
        recent.add(step, {"reward/mean": float(step), "policy/loss": math.nan})
    kept = [json.loads(line) for line in recent.text().splitlines()]
    assert [record["step"] for record in kept] == list(range(31 - LEAST_STEPS, 31))
    assert kept[-1] == {"step": 30, "reward/mean": 30.0, "policy/loss": None}


def test_steps_without_a_record_are_taken_from_the_checkpoint_as_far_as_it_has_them(tmp_path: Path) -> None:
    recent = RecentSteps(kept_s=60.0)
    for step in (4, 5, 6):
        recent.add(step, {"time/step_s": 2.0})
    write_step_metrics(tmp_path, recent.text())
    logged = [{"step": step, "time/written_at_s": at_s} for step, at_s in ((1.0, 7.0), (4.0, 9.0))]
    logged.append({"step": 6.0, "eval/x": 1.0})
    missing = missing_steps(logged, 6)
    assert missing == [2, 3, 5, 6]
    found = restored_records(tmp_path, missing, logged)
    assert [(r["step"], r["time/written_at_s"], r["log/restored"]) for r in found] == [(5, 11.0, 1.0), (6, 13.0, 1.0)]
    assert restored_records(tmp_path / "of an older version", missing, logged) == []
