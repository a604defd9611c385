"""The driver's log of a resumed run: its counts are those of the whole run, its plot that of the steps since."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.base.messages.reports import StepDone, TrainingEnded, WorkerReport
from async_rl.base.run_dir.checkpoints import TrainingState, checkpoint_folder, lineage_of, write_training_state
from async_rl.base.telemetry.metrics import Metric
from async_rl.base.telemetry.timeline import Span
from async_rl.run.log.run_log import RunLog
from tests.kit.configs import make_config, opened_run
from tests.kit.runs import logged

RESUMED_AT = 40


def resumed_log(tmp_path: Path) -> RunLog:
    """The log of a run whose first RESUMED_AT steps have failed groups and skipped evaluations."""
    run_dir = tmp_path / "r"
    folder = checkpoint_folder(run_dir, RESUMED_AT)
    folder.mkdir(parents=True)
    write_training_state(folder, TrainingState(
        version=RESUMED_AT, lineage=0, ranks=1, networks={}, kl_coef=0.0, buffer={},
    ))  # fmt: skip
    records = [{"step": step, "time/written_at_s": float(step), "rollout/failed": 0.0} for step in range(1, 41)]
    records[9] |= {"rollout/failed": 3.0, "eval/skipped": 1.0}
    records[29] |= {"rollout/failed": 2.0, "eval/skipped": 4.0}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return RunLog(make_config(
        run={"name": "r", "dir": str(tmp_path), "resume": str(folder)}, logging={"wandb": "disabled"}
    ))  # fmt: skip


def train(log: RunLog, steps: int) -> None:
    for number in range(steps):
        start_s, end_s = 10.0 * number, 10.0 * number + 10.0
        log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", start_s, end_s + 1),)))
        span = Span("learner/0", "busy", start_s, end_s)
        log.add("learner/0", StepDone(version=RESUMED_AT + 1 + number, metrics=(), spans=(span,)))


def test_counts_of_the_summary_are_those_of_the_whole_run(tmp_path: Path) -> None:
    log = resumed_log(tmp_path)
    log.add("rollout/0", WorkerReport(metrics=(Metric("rollout/failed", 1.0, "sum"),)))
    log.skipped_eval(RESUMED_AT, "the evaluation before it is still running")
    train(log, 1)
    summary = log.summary({})
    log.close()
    assert (summary["failed_groups"], summary["skipped_evaluations"]) == (6, 5)
    assert logged(tmp_path / "r")[-1]["eval/skipped"] == 5.0


@pytest.mark.parametrize("is_stop", [True, False])
def test_a_summary_counts_a_resume_unless_that_is_undone(tmp_path: Path, is_stop: bool) -> None:
    resumed_log(tmp_path).close()
    with opened_run(make_config(run={"resume": tmp_path / "r"}, logging={"wandb": "disabled"})) as config:
        log = RunLog(config)
        log.add("learner/0", TrainingEnded(version=RESUMED_AT, reason="the pause ran out", is_stop=is_stop))
        log.close()
        summary = log.summary({})
    assert summary["resumes"] == lineage_of(config.run_dir) == (0 if is_stop else 1)
