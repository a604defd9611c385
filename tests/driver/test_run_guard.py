from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.driver.run_guard import RunGuard
from async_rl.driver.run_log import RunLog
from async_rl.driver.watchdog import Watchdog
from async_rl.messages.reports import EvaluationDone, StepDone, TrainingEnded, WorkerReport
from async_rl.storage.checkpoints import TrainingState, checkpoint_folder, list_checkpoints, write_training_state
from async_rl.storage.guard_events import answer_pause, open_pause, pending_rollback, read_guard_events
from async_rl.storage.run_dir import is_complete, is_of_newest_end, open_run_dir
from async_rl.telemetry.metrics import Metric
from async_rl.telemetry.timeline import Span
from tests.kit.configs import changed, make_config
from tests.kit.runs import logged


class Calls:
    """Stands for the actor of a learner rank, and keeps the names of its calls."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda: self.made.append(name))


class Run:
    """A log with a guard whose every window has two kinds of signals beyond their limits once `is_bad`."""

    def __init__(self, folder: Path, resume: str = "", steps: int = 100, **guard: Any) -> None:
        settings = {"every_steps": 1, "kl_limit": 10.0, "kl_per_token_limit": math.inf, "tighten": "lr", **guard}
        self.config = make_config(
            run={"dir": str(folder), "name": "r", "resume": resume, "steps": steps}, guard=settings,
            checkpoint={"every_steps": 1, "keep_last": 1}, eval={"every_steps": 1}, logging={"wandb": "disabled"},
        )  # fmt: skip
        self.run_dir = self.config.run_dir
        self.log = RunLog(self.config)
        self.learner = Calls()
        self.processes: Any = SimpleNamespace(actors={"learner/0": self.learner})
        self.watchdog = Watchdog(self.config, self.processes)
        assert self.log.guard
        self.guard = RunGuard(self.config, self.processes, self.log, self.log.guard, self.watchdog)

    def step(self, version: int, is_bad: bool = False, ahead: int = 0) -> None:
        for saved in range(version + ahead if version > 1 else 1, version + ahead + 1):  # ahead of the log
            (folder := checkpoint_folder(self.run_dir, saved)).mkdir(parents=True, exist_ok=True)
            state = TrainingState(version=saved, lineage=0, ranks=1, networks={}, kl_coef=0.1, buffer={})
            write_training_state(folder, state)
        values = {
            "batch/episodes": 64.0, "response/length_mean": 10.0, "response/truncated_fraction": 0.9 * is_bad,
            "kl/reference": 2.0 * is_bad, "reward/mean": 1.0, "reward/std": 1.0,
        }  # fmt: skip
        spans = tuple(Span(pool, "busy", version - 1.0, float(version)) for pool in ("learner/0", "rollout/0"))
        metrics = tuple(Metric(key, value) for key, value in values.items())
        self.log.add("learner/0", StepDone(version=version, metrics=metrics, spans=spans[:1]))
        self.log.add("rollout/0", WorkerReport(spans=spans[1:]))
        self.guard.act()

    def evaluate(self, version: int, gold: float) -> None:
        found = {"eval/gold": gold, "eval/gold_squared": gold * gold + 1, "eval/gold_labels": 64.0}
        metrics = tuple(Metric(key, value) for key, value in found.items())
        self.log.add_eval(EvaluationDone(version=version, metrics=metrics))

    def kinds(self) -> list[str]:
        return [event.kind for event in read_guard_events(self.run_dir)]


def test_a_guard_that_warns_says_so_and_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path, action="warn")
    for version in range(1, 5):
        run.step(version, is_bad=version > 2)
    assert not run.learner.made and run.kinds() == []
    said = capsys.readouterr().out
    assert said.count("guard: step 3: the KL to the reference is 20 nats an answer (guard.kl_limit: at most 10)") == 1
    assert "90% of the answers are cut off" in said
    assert [line["guard/kl"] for line in logged(run.run_dir)] == [0.0, 0.0, 20.0, 20.0]
    assert list(list_checkpoints(run.run_dir)) == [4]


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_rollback_is_to_the_checkpoint_of_three_windows_before_which_was_kept(tmp_path: Path, ahead: int) -> None:
    run = Run(tmp_path, action="rollback")
    for version in range(1, 8):
        run.step(version, version > 6, ahead)
    assert list(list_checkpoints(run.run_dir)) == [4, 5, 6, 7, 8, 9, 10][: 4 + ahead], "keep_last is 1"
    (event,) = read_guard_events(run.run_dir)
    assert (event.kind, event.version, event.back_to, event.signals) == ("rollback", 7, 4, ("kl", "cut"))
    assert run.learner.made == ["stop"]
    (run.run_dir / "model").mkdir()  # as the learner saves it at its end
    summary: dict[str, Any] = {}
    run.guard.complete(summary)
    assert summary == {"rolled_back": 4}
    assert not (run.run_dir / "model").exists(), "a life that is interrupted would upload it"
    run.step(8, is_bad=True)
    assert run.kinds() == ["rollback"], "the run is ending"
    assert 4 in list_checkpoints(run.run_dir), "also after further steps"


def test_after_its_last_rollback_the_next_trouble_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, action="rollback", max_rollbacks=2, rollbacks=2)
    run.step(1, is_bad=True)
    assert run.kinds() == ["stop"] and run.learner.made == ["stop"]
    assert run.log.end_reason.startswith("the guard ended the run at step 1, with the model of version 1: the KL")


def test_a_paused_run_waits_for_an_answer_and_goes_on_without_the_accepted_signals(tmp_path: Path) -> None:
    run = Run(tmp_path, action="pause")
    run.step(1, is_bad=True)
    assert run.learner.made == ["pause"]
    assert run.watchdog.note.startswith("paused by the guard since step 1: the KL to the reference is 20 nats")
    run.step(2, is_bad=True)
    run.guard.look()
    assert run.kinds() == ["pause"] and run.learner.made == ["pause"]
    (run.run_dir / "guard_answer").write_text("go_on")
    run.guard.look()
    assert run.learner.made == ["pause", "go_on"] and run.watchdog.note == "running"
    for version in range(3, 6):
        run.step(version, is_bad=True)
    assert run.kinds() == ["pause", "go_on"]


@pytest.mark.parametrize(("answer", "kind"), [("rollback", "rollback"), ("stop", "stop")])
def test_a_pause_may_be_answered_by_going_back_or_ending(tmp_path: Path, answer: str, kind: str) -> None:
    run = Run(tmp_path, action="pause")
    run.step(1, is_bad=True)
    (run.run_dir / "guard_answer").write_text(answer)
    run.guard.look()
    assert run.kinds() == ["pause", kind] and run.learner.made == ["pause", "stop"]


def test_a_resumed_run_pauses_again_until_it_is_answered(tmp_path: Path) -> None:
    first = Run(tmp_path, action="pause")
    first.step(1, is_bad=True)
    first.log.close()
    (first.run_dir / "guard_answer").write_text("stop")
    with open_run_dir(changed(first.config, run={"resume": str(first.run_dir)})) as config:
        again = Run(tmp_path, config.run.resume, action="pause")
        again.guard.begin()
        again.guard.look()
        assert again.learner.made == ["pause"], "an answer to the run before is not for this one"
        assert again.watchdog.note.startswith("paused by the guard since step 1")


def test_a_paused_run_may_be_answered_while_its_resume_starts(tmp_path: Path) -> None:
    first = Run(tmp_path, action="pause")
    first.step(1, is_bad=True)
    first.log.close()
    with open_run_dir(changed(first.config, run={"resume": str(first.run_dir)})) as config:
        answer_pause(first.run_dir, "go_on")
        again = Run(tmp_path, config.run.resume, action="pause")
        again.guard.begin()
        again.guard.look()
        assert again.learner.made == ["pause", "go_on"] and again.kinds() == ["pause", "go_on"]


def test_a_run_resumed_from_before_its_pause_pauses_only_at_the_next_trouble(tmp_path: Path) -> None:
    first = Run(tmp_path, action="pause")
    for version in range(1, 4):
        first.step(version, is_bad=version > 2)
    first.log.close()
    with open_run_dir(changed(first.config, run={"resume": str(checkpoint_folder(first.run_dir, 2))})) as config:
        again = Run(tmp_path, config.run.resume, action="pause")
        again.guard.begin()
        (first.run_dir / "guard_answer").write_text("go_on")  # to the pause that holds no more
        again.guard.look()
        assert again.learner.made == [] and again.kinds() == ["pause"], "before its first step the resume may be undone"
        for version in range(3, 6):
            again.step(version, is_bad=version > 4)
            again.guard.look()
    assert again.kinds() == ["pause", "resumed", "pause"] and again.learner.made == ["pause"]
    assert again.watchdog.note.startswith("paused by the guard since step 5")


def test_a_paused_run_whose_newest_checkpoint_is_from_before_its_pause_pauses_again(tmp_path: Path) -> None:
    first = Run(tmp_path, action="pause")
    for version in range(1, 4):
        first.step(version, is_bad=version > 2)
    first.log.close()
    shutil.rmtree(checkpoint_folder(first.run_dir, 3))  # as if checkpoint.every_steps were 2, and the run was killed
    with open_run_dir(changed(first.config, run={"resume": str(first.run_dir)})) as config:
        again = Run(tmp_path, config.run.resume, action="pause")
        again.guard.begin()
        assert again.log.version == 2 and again.learner.made == ["pause"]
        assert again.watchdog.note.startswith("paused by the guard since step 3")
        answer_pause(first.run_dir, "go_on")
        again.guard.look()
        again.step(3, is_bad=True)
    assert again.kinds() == ["pause", "go_on"] and again.learner.made == ["pause", "go_on"]


def test_a_pause_answered_by_ending_in_a_resume_without_a_step_ends_the_run(tmp_path: Path) -> None:
    first = Run(tmp_path, action="pause")
    for version in range(1, 4):
        first.step(version, is_bad=version > 2)
    first.log.close()
    shutil.rmtree(checkpoint_folder(first.run_dir, 3))  # the run was killed before it was whole
    with open_run_dir(changed(first.config, run={"resume": str(first.run_dir)})) as config:
        again = Run(tmp_path, config.run.resume, action="pause")
        again.guard.begin()
        answer_pause(first.run_dir, "stop")
        again.guard.look()
        again.log.add("learner/0", TrainingEnded(version=2, reason="stopped at version 2", is_stop=True))
        again.log.close()
        summary = again.log.summary({})
        (first.run_dir / "summary.json").write_text(json.dumps(summary))
    assert again.kinds() == ["pause", "stop"] and is_complete(first.run_dir, config)
    assert [line["step"] for line in logged(first.run_dir)] == [1, 2] and is_of_newest_end(summary, 2, first.run_dir)


def test_gold_rewards_of_evaluations_decide_where_there_are_some(tmp_path: Path) -> None:
    run = Run(tmp_path, action="stop_at_best")
    for version, gold in enumerate((0.0, 1.0, 2.0, 1.0, 0.0, -2.0), 1):
        run.step(version)
        run.evaluate(version, gold)
        run.guard.act()
    (event,) = read_guard_events(run.run_dir)
    # in threes: 1, 4/3, 1, -1/3, with an error of 192 answers of variance 1: .072. The first fall is of 4.6 of these
    assert (event.kind, event.version, event.back_to, event.signals) == ("stop", 5, 3, ("gold_fall",))


@pytest.mark.parametrize(
    ("action", "ended", "steps", "kind"),
    [
        ("stop_at_best", "", 5, "stop"), ("rollback", "", 5, "rollback"), ("pause", "", 5, ""),
        ("rollback", "the program ended the run", 5, "stop"), ("rollback", "", 6, "stop"),  # by run.seconds
    ],
)  # fmt: skip
def test_trouble_in_the_evaluation_after_the_last_step_is_acted_on_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], action: str, ended: str, steps: int, kind: str
) -> None:
    run = Run(tmp_path, steps=steps, action=action)
    for version, gold in enumerate((0.0, 1.0, 2.0, 1.0, 0.0), 1):
        run.step(version)
        if version == 5 and ended:
            run.log.add("learner/0", TrainingEnded(version=5, reason=ended))
        run.evaluate(version, gold)
        run.guard.act(at_end=version == 5)
    if action == "pause":
        assert run.kinds() == run.learner.made == [] and run.watchdog.note == "running"
        assert f"async-rl export {checkpoint_folder(run.run_dir, 3)} OUT_DIR\n" in capsys.readouterr().out
        run.log.close()
        assert 3 in list_checkpoints(run.run_dir)
        return
    (event,) = read_guard_events(run.run_dir)
    assert (event.kind, event.version, event.back_to) == (kind, 5, 3)
    assert run.log.summary({})["ended"].startswith("the guard ")


@pytest.mark.parametrize(("steps", "ended"), [(5, ""), (100, "the program ended the run")])
def test_trouble_in_the_last_step_itself_does_not_pause_a_run_that_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, ended: str
) -> None:
    run = Run(tmp_path, steps=steps, action="pause")
    for version in range(1, 5):
        run.step(version)
    if ended:  # told before the last step is logged, which waits for other reports
        run.log.add("learner/0", TrainingEnded(version=5, reason=ended))
    run.step(5, is_bad=True)
    assert run.kinds() == run.learner.made == [] and run.watchdog.note == "running"
    assert f"async-rl export {checkpoint_folder(run.run_dir, 2)} OUT_DIR\n" in capsys.readouterr().out
    run.guard.act(at_end=True)
    assert run.kinds() == []


def test_a_pause_that_came_after_the_learners_last_step_is_over_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, action="pause")
    for version in range(1, 6):
        run.step(version, is_bad=version > 4)
    assert run.kinds() == ["pause"]  # the learner has ended by run.seconds, which the driver learns only from its end
    run.guard.act(at_end=True)
    assert run.kinds() == ["pause", "ended"] and run.watchdog.note == "running"
    assert f"async-rl export {checkpoint_folder(run.run_dir, 2)} OUT_DIR\n" in capsys.readouterr().out
    assert open_pause(run.run_dir) is None


def test_a_rollback_is_over_once_the_resumed_run_has_made_a_step(tmp_path: Path) -> None:
    first = Run(tmp_path, action="rollback")
    first.step(1)
    first.step(2, is_bad=True)
    first.log.close()
    again = Run(tmp_path, str(checkpoint_folder(first.run_dir, 1)), action="rollback", rollbacks=1)
    again.guard.begin()
    assert again.kinds() == ["rollback"] and pending_rollback(first.run_dir) == checkpoint_folder(first.run_dir, 1)
    again.step(2)
    assert again.kinds() == ["rollback", "resumed"] and pending_rollback(first.run_dir) is None


def test_a_rollback_is_over_too_if_the_resumed_run_ends_without_a_step(tmp_path: Path) -> None:
    first = Run(tmp_path, action="rollback")
    for version in range(1, 6):
        first.step(version, is_bad=version > 4)
    first.log.close()
    pending = checkpoint_folder(first.run_dir, 2)
    assert pending_rollback(first.run_dir) == pending
    with open_run_dir(changed(first.config, run={"resume": str(pending)})) as config:
        again = Run(tmp_path, config.run.resume, action="rollback")
        again.guard.begin()
        again.log.add("learner/0", TrainingEnded(version=2, reason="the program ended the run"))
        again.guard.act()
        again.log.close()
        (first.run_dir / "summary.json").write_text(json.dumps(again.log.summary({})))
    assert again.kinds() == ["rollback", "resumed"] and pending_rollback(first.run_dir) is None
    assert list(list_checkpoints(first.run_dir)) == [2] and [line["step"] for line in logged(first.run_dir)] == [1, 2]
    assert is_complete(first.run_dir, config)


def test_a_rollback_is_not_over_if_the_user_stops_the_resumed_run_before_a_step(tmp_path: Path) -> None:
    first = Run(tmp_path, action="rollback")
    first.step(1)
    first.step(2, is_bad=True)
    first.log.close()
    with open_run_dir(changed(first.config, run={"resume": str(checkpoint_folder(first.run_dir, 1))})) as config:
        again = Run(tmp_path, config.run.resume, action="rollback")
        again.guard.begin()
        again.log.add("learner/0", TrainingEnded(version=1, reason="stopped at version 1", is_stop=True))
        again.guard.act()
        again.log.close()
    assert again.kinds() == ["rollback"] and list(list_checkpoints(first.run_dir)) == [1, 2]


def test_a_resume_with_only_the_end_of_a_run_left_acts_on_its_evaluation(tmp_path: Path) -> None:
    first = Run(tmp_path, action="rollback")
    for version, gold in enumerate((0.0, 1.0, 2.0, 1.0), 1):
        first.step(version)
        first.evaluate(version, gold)
    first.step(5)
    first.log.close()
    with open_run_dir(changed(first.config, run={"resume": str(first.run_dir), "steps": 5})) as config:
        again = Run(tmp_path, config.run.resume, steps=5, action="rollback")
        again.guard.begin()
        again.log.add("learner/0", TrainingEnded(version=5, reason=""))
        again.evaluate(5, 0.0)
        again.guard.act(at_end=True)
        again.log.close()
    (event,) = read_guard_events(first.run_dir)
    assert (event.kind, event.version, event.back_to) == ("rollback", 5, 3)
