from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.driver.run_alarms import RunAlarms
from async_rl.driver.run_log import RunLog
from async_rl.driver.watchdog import Watchdog
from async_rl.messages.reports import StepDone, TrainingEnded, WorkerReport
from async_rl.storage.checkpoints import TrainingState, checkpoint_folder, list_checkpoints, write_training_state
from async_rl.telemetry.metrics import Metric
from async_rl.telemetry.status import format_status
from async_rl.telemetry.timeline import Span
from tests.kit.configs import make_config
from tests.kit.runs import logged


class StoppedLearner:
    """Stands for the actor of a learner rank, and counts its stops."""

    def __init__(self) -> None:
        self.stops = 0
        self.stop = SimpleNamespace(remote=self._stop)

    def _stop(self) -> None:
        self.stops += 1


class WatchedRun:
    """A log whose windows are of one step, and what acts on it."""

    def __init__(self, folder: Path, resume: str = "", **sections: Any) -> None:
        self.config = make_config(
            run={"dir": str(folder), "name": "r", "resume": resume}, logging={"wandb": "disabled"},
            **{"checkpoint": {"every_steps": 1, "keep_last": 1}, **sections},
        )  # fmt: skip
        self.run_dir = self.config.run_dir
        self.log = RunLog(self.config)
        self.learner = StoppedLearner()
        processes: Any = SimpleNamespace(actors={"learner/0": self.learner, "rollout/0": None}, place=None)
        self.watchdog = Watchdog(self.config, processes)
        self.alarms = RunAlarms(self.config, processes, self.log, self.watchdog)

    def step(
        self, version: int, reward: float, has_checkpoint: bool = True, cut: float = 0.0, staleness: float = 0.0
    ) -> None:
        if has_checkpoint:
            self.checkpoint(version)
        values = {"batch/episodes": 64.0, "reward/mean": reward, "reward/std": 0.5, "staleness/mean": staleness}
        values["response/truncated_fraction"] = cut
        spans = tuple(Span(pool, "busy", version - 1.0, float(version)) for pool in ("learner/0", "rollout/0"))
        metrics = tuple(Metric(key, value) for key, value in values.items())
        self.log.add("learner/0", StepDone(version=version, metrics=metrics, spans=spans[:1]))
        self.log.add("rollout/0", WorkerReport(spans=spans[1:]))
        self.alarms.act()

    def checkpoint(self, version: int) -> None:
        folder = checkpoint_folder(self.run_dir, version)
        folder.mkdir(parents=True, exist_ok=True)
        state = TrainingState(version=version, lineage=0, ranks=1, networks={}, kl_coef=0.1, buffer={})
        write_training_state(folder, state)


def test_a_note_tells_the_console_metrics_status_and_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = WatchedRun(tmp_path, alarms={"window_steps": 1})
    for version, reward in enumerate((0.4, 0.9, 0.8, 0.1, 0.1), 1):
        run.step(version, reward)
    run.watchdog.write_status("running")
    run.alarms.complete({})
    assert run.learner.stops == 0 and not run.log.end_reason
    said = capsys.readouterr().out
    assert said.count("ALARM at step 4: the mean reward has fallen from 0.9 to 0.1") == 1
    assert [line["alarm/reward"] for line in logged(run.run_dir)] == [0.0, 0.0, 0.0, 1.0, 1.0]
    sentence = run.log.summary({})["alarms"]
    assert sentence.endswith("fallen from 0.9 to 0.1. Alarms: reward since step 4 (docs/not-learning.md)")
    assert sentence in format_status(run.run_dir)
    assert json.loads((run.run_dir / "status.json").read_text())["note"] == "running"
    assert list(list_checkpoints(run.run_dir)) == [5]


def test_a_stop_keeps_the_checkpoint_before_the_fall_and_ends_with_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = WatchedRun(tmp_path, alarms={"window_steps": 1, "action": "stop"})
    for version, reward in enumerate((0.4, 0.9, 0.8, 0.8), 1):
        run.step(version, reward)
    # version 1 has sampled the batch of step 2, the best one; keep_last alone would keep 4
    assert list(list_checkpoints(run.run_dir)) == [1, 4] and run.learner.stops == 0
    run.step(5, 0.1)
    run.step(6, 0.1)
    assert run.learner.stops == 1 and list(list_checkpoints(run.run_dir)) == [1, 6]
    run.log.add("learner/0", TrainingEnded(version=6, reason="stopped at version 6"))
    exported: list[tuple[Path, Path]] = []
    monkeypatch.setattr("learner.models.export.export", lambda *paths: exported.append(paths))
    summary = run.log.summary({})
    run.alarms.complete(summary)
    assert exported == [(checkpoint_folder(run.run_dir, 1), run.run_dir / "model")]
    assert summary["model_version"] == 1
    assert summary["ended"].startswith(
        "an alarm ended the run at step 5 (alarms.action stop), with the model of version 1: the mean reward has fallen"
    )


def test_the_checkpoint_of_stale_batches_is_still_there_when_they_show_its_reward(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path, alarms={"window_steps": 1, "action": "stop"})
    for version in range(1, 7):
        run.step(version, 0.1 * version, staleness=2.0)
    # step 6 has trained answers of version 3, the best so far; those of 4 to 6 may come next
    assert list(list_checkpoints(run.run_dir)) == [3, 4, 5, 6]
    run.checkpoint(8)  # two steps are trained that are not logged yet
    run.checkpoint(9)
    run.step(7, 0.7, staleness=2.0)
    assert list(list_checkpoints(run.run_dir)) == [4, 5, 6, 7, 8, 9]


def test_a_stop_before_the_first_checkpoint_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = WatchedRun(tmp_path, alarms={"window_steps": 1, "action": "stop"})
    for version, reward in enumerate((0.9, 0.1), 1):
        run.step(version, reward, has_checkpoint=False)
    assert run.learner.stops == 1
    assert (
        "the model of its last step, as there is no checkpoint yet (checkpoint.every_steps); the one before the fall "
        "is that of model.path: the mean reward has fallen"
    ) in run.log.end_reason
    run.checkpoint(2)  # the learner writes one when it stops
    written: list[int] = []
    monkeypatch.setattr("async_rl.driver.run_alarms.write_model_of", lambda folder, version, s: written.append(version))
    run.alarms.complete({})
    assert written == [2]


def test_an_alarm_from_before_a_resume_does_not_end_the_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"window_steps": 1, "action": "stop"}
    first = WatchedRun(tmp_path, alarms=settings)
    for version, reward in enumerate((0.9, 0.9, 0.1), 1):
        first.step(version, reward)
    first.log.close()
    assert first.learner.stops == 1
    capsys.readouterr()
    again = WatchedRun(tmp_path, resume=str(checkpoint_folder(first.run_dir, 3)), alarms=settings)
    again.step(4, 0.1)
    assert again.learner.stops == 0 and "ALARM" not in capsys.readouterr().out
    assert again.log.summary({})["alarms"].endswith("Alarms: reward since step 3 (docs/not-learning.md)")
    again.step(5, 0.9)
    again.step(6, 0.1)  # a new one
    assert again.learner.stops == 1


def test_an_alarm_that_is_over_is_told_and_a_caution_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = WatchedRun(tmp_path, alarms={"window_steps": 1, "action": "stop"})
    run.step(1, 0.3, cut=0.95)
    run.step(2, 0.3, cut=0.95)
    run.step(3, 0.7, cut=0.95)
    assert run.learner.stops == 0
    said = capsys.readouterr().out
    assert said.count("ALARM at step 1: 95% of the answers are cut off, 95% at the start, and rewards are low.") == 1
    assert said.count("step 3: the alarm all_cut, on since step 1, is over") == 1
    assert [line["alarm/all_cut"] for line in logged(run.run_dir)] == [1.0, 1.0, 0.0]


def test_a_run_that_ends_already_is_not_ended_again(tmp_path: Path) -> None:
    run = WatchedRun(tmp_path, alarms={"window_steps": 1, "action": "stop"})
    run.step(1, 0.9)
    run.log.end_reason = "the guard went back to version 1"
    run.step(2, 0.1)
    assert run.learner.stops == 0 and run.log.end_reason == "the guard went back to version 1"
