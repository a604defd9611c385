from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.base.messages.reports import EvaluationDone, StepDone, TrainingEnded, WorkerReport
from async_rl.base.run_dir.checkpoints import checkpoint_folder, list_checkpoints
from async_rl.base.run_dir.watch_events import answer_pause, read_events
from async_rl.base.telemetry.metrics import Metric
from async_rl.base.telemetry.status import format_status
from async_rl.base.telemetry.timeline import Span
from async_rl.run.log.run_log import RunLog
from async_rl.run.processes.supervisor import Supervisor
from tests.kit.configs import changed, make_config, opened_run
from tests.kit.runs import logged, make_checkpoint

pytestmark = pytest.mark.processes  # together they compute for long

BAD = 7
"""The first step whose rewards are 0 in most tests: 1 to 6 get 1, and the answers of 6, the best, are of version 5."""


class Calls:
    """Stands for the actor of a learner rank, and keeps the names of its calls."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda: self.made.append(name))


class Run:
    """A log with a watcher, and what acts on it."""

    def __init__(self, folder: Path, resume: str = "", steps: int = 100, **watch: Any) -> None:
        self.config = make_config(
            run={"dir": str(folder), "name": "r", "resume": resume, "steps": steps}, watch=watch,
            checkpoint={"every_steps": 1, "keep_last": 1}, eval={"every_steps": 1}, logging={"wandb": "disabled"},
        )  # fmt: skip
        self.run_dir = self.config.run_dir
        self.log = RunLog(self.config)
        self.is_closed = False
        self.learner = Calls()
        self.processes: Any = SimpleNamespace(
            actors={"learner/0": self.learner}, place=None, reservation=SimpleNamespace(host_of=lambda name: "h"),
        )
        supervisor = Supervisor(self.config, self.processes, self.log, {})
        self.act, self.watchdog = supervisor.act, supervisor.watchdog
        self.watch: Any = supervisor.watch

    def checkpoint(self, version: int) -> None:
        if version not in list_checkpoints(self.run_dir):
            make_checkpoint(self.run_dir, version)

    def step(self, version: int, is_bad: bool = False, ahead: int = 0, saves: bool = True) -> None:
        if saves:
            for saved in range(version + ahead if version > 1 else 1, version + ahead + 1):  # ahead of the log
                self.checkpoint(saved)
        values = {"batch/episodes": 64.0, "reward/mean": float(not is_bad), "reward/std": 0.1}
        spans = tuple(Span(pool, "busy", version - 1.0, float(version)) for pool in ("learner/0", "rollout/0"))
        metrics = tuple(Metric(key, value) for key, value in values.items())
        self.log.add("learner/0", StepDone(version=version, metrics=metrics, spans=spans[:1]))
        self.log.add("rollout/0", WorkerReport(spans=spans[1:]))
        self.act()

    def steps(self, last: int, first: int = 1, **more: Any) -> None:
        """Make some steps, from BAD on bad ones."""
        for version in range(first, last + 1):
            self.step(version, version >= BAD, **more)

    def evaluate(self, version: int, gold: float) -> None:
        found = {"eval/gold": gold, "eval/gold_squared": gold * gold + 1, "eval/gold_labels": 64.0}
        metrics = tuple(Metric(key, value) for key, value in found.items())
        self.log.add_eval(EvaluationDone(version=version, metrics=metrics))

    def close(self) -> None:
        if not self.is_closed:
            self.log.close()
        self.is_closed = True

    def kinds(self) -> list[str]:
        return [event.kind for event in read_events(self.run_dir)]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints whose models are exported."""
    found: list[Path] = []
    monkeypatch.setattr("learner.models.export.export", lambda source, target: found.append(source))
    return found


def troubled(folder: Path, action: str, **more: Any) -> Run:
    """A run whose rewards have fallen at step BAD."""
    run = Run(folder, action=action, **more)
    run.steps(BAD)
    return run


@contextmanager
def next_life(first: Run, version: int | None = None, steps: int = 100) -> Iterator[Run]:
    """The run resumed in its directory, from its newest checkpoint or from that of `version`."""
    first.close()
    if version is not None and version not in list_checkpoints(first.run_dir):
        first.checkpoint(version)
    resume = str(first.run_dir if version is None else checkpoint_folder(first.run_dir, version))
    with opened_run(changed(first.config, run={"resume": resume, "steps": steps})) as config:
        again = Run(first.run_dir.parent, config.run.resume, steps, action=config.watch.action)
        again.watch.begin()
        yield again
        again.close()


def end(run: Run, reason: str, is_stop: bool = False) -> None:
    run.log.add("learner/0", TrainingEnded(version=5, reason=reason, is_stop=is_stop))


def answer(run: Run, text: str) -> None:
    (run.run_dir / "watch_answer").write_text(text)
    run.watch.look()


def test_a_watcher_that_warns_reports_everywhere_and_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, action="warn")
    run.steps(8)
    for version in range(9, 14):
        run.step(version)
    run.watchdog.write_status("running")
    assert not run.learner.made and run.kinds() == [] and list(list_checkpoints(run.run_dir)) == [13]
    assert capsys.readouterr().out.count("ALARM at step 7") == 1
    # on while two of the newest five steps are bad; the first four are no window
    assert [line.get("alarm/reward") for line in logged(run.run_dir)] == [None] * 4 + [0.0] * 2 + [1.0] * 5 + [0.0] * 2
    sentence = run.log.summary({})["alarms"]
    assert "reward 5 times" in sentence and sentence in format_status(run.run_dir)


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_rollback_is_to_the_newest_checkpoint_at_the_best_reward_which_was_kept(tmp_path: Path, ahead: int) -> None:
    run = Run(tmp_path, action="rollback")
    run.steps(BAD, ahead=ahead)
    assert 5 in list_checkpoints(run.run_dir), "keep_last is 1"
    (event,) = read_events(run.run_dir)
    assert (event.kind, event.version, event.back_to, event.rules) == ("rollback", 7, 5, ("reward",))
    assert run.learner.made == ["stop"]
    (run.run_dir / "model").mkdir()  # as the learner saves it at its end
    summary: dict[str, Any] = {}
    run.watch.complete(summary)
    assert summary == {"rolled_back": 5}
    assert not (run.run_dir / "model").exists(), "a life that is interrupted would upload it"
    run.step(8, is_bad=True)
    assert run.kinds() == ["rollback"], "the run is ending"
    assert 5 in list_checkpoints(run.run_dir), "also after further steps"


def test_after_its_last_rollback_the_next_trouble_ends_the_run(tmp_path: Path, exported: list[Path]) -> None:
    run = troubled(tmp_path, "rollback", max_rollbacks=2, rollbacks=2)
    assert run.kinds() == ["stop"] and run.learner.made == ["stop"]
    summary = run.log.summary({})
    run.watch.complete(summary)
    assert exported == [checkpoint_folder(run.run_dir, 5)] and summary["model_version"] == 5
    assert "version 5" in summary["ended"]


def test_a_stop_before_the_first_checkpoint_ends_with_the_model_of_the_last_step(
    tmp_path: Path, exported: list[Path]
) -> None:
    run = Run(tmp_path, action="stop")
    run.steps(BAD, saves=False)
    assert run.learner.made == ["stop"]
    run.checkpoint(BAD)  # the learner writes one when it stops
    run.watch.complete({})
    assert exported == [checkpoint_folder(run.run_dir, BAD)]


def test_a_rollback_without_a_checkpoint_lets_the_run_go_on(tmp_path: Path) -> None:
    run = Run(tmp_path, action="rollback")
    run.steps(BAD, saves=False)
    assert run.learner.made == run.kinds() == [] and not run.log.end_reason


def test_an_alarm_from_before_a_resume_is_not_acted_on_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = troubled(tmp_path, "stop")
    first.log.close()
    assert first.learner.made == ["stop"]
    capsys.readouterr()
    again = Run(tmp_path, str(checkpoint_folder(first.run_dir, BAD)), action="stop")
    again.step(8, is_bad=True)
    assert not again.learner.made and "ALARM" not in capsys.readouterr().out
    for version in range(9, 17):
        again.step(version, is_bad=version > 14)  # a new one
    assert again.learner.made == ["stop"]


def test_a_paused_run_waits_for_an_answer_and_goes_on_without_the_accepted_rules(tmp_path: Path) -> None:
    run = troubled(tmp_path, "pause")
    assert run.learner.made == ["pause"]
    assert "step 7" in run.watchdog.note
    run.step(8, is_bad=True)
    run.watch.look()
    assert run.kinds() == ["pause"] and run.learner.made == ["pause"]
    answer(run, "go-on")
    assert run.learner.made == ["pause", "go_on"] and run.watchdog.note == "running"
    for version in range(9, 18):
        run.step(version, is_bad=version > 14)
    assert run.kinds() == ["pause", "go-on"]


@pytest.mark.parametrize("text", ["rollback", "stop"])
def test_a_pause_may_be_answered_by_going_back_or_ending(tmp_path: Path, text: str) -> None:
    run = troubled(tmp_path, "pause")
    answer(run, text)
    assert run.kinds() == ["pause", text] and run.learner.made == ["pause", "stop"]


def test_a_resumed_run_pauses_again_until_it_is_answered(tmp_path: Path) -> None:
    first = troubled(tmp_path, "pause")
    (first.run_dir / "watch_answer").write_text("stop")
    with next_life(first) as again:
        again.watch.look()
        assert again.learner.made == ["pause"], "an answer to the run before is not for this one"
        answer_pause(first.run_dir, "go-on")
        again.watch.look()
        assert again.learner.made == ["pause", "go_on"] and again.kinds() == ["pause", "go-on"]


def test_a_stop_that_is_killed_is_completed_by_the_next_resume(tmp_path: Path, exported: list[Path]) -> None:
    first = troubled(tmp_path, "stop")
    with next_life(first) as again:
        assert again.learner.made == ["stop"] and "version 5" in again.log.end_reason
        again.watch.complete({})
        assert exported == [checkpoint_folder(first.run_dir, 5)]
    with next_life(first) as later:
        later.step(BAD + 1)
        assert later.learner.made == [], "who resumes a run that has stopped wants it to go on"


def test_a_resume_from_before_a_stop_goes_on(tmp_path: Path) -> None:
    first = troubled(tmp_path, "stop")
    with next_life(first, 5) as again:
        again.step(6)
    with next_life(first) as later:
        assert again.learner.made == later.learner.made == []


GOLD = (0.0, 1.0, 2.0, 1.0, 0.0)
"""Gold rewards of variance 1 and 64 labels. The best three, 1 to 1, are around 3; the last, 0, is far below these."""


@pytest.mark.parametrize(
    ("action", "ended", "steps", "kind"),
    [
        ("stop", "", 5, "stop"), ("rollback", "", 5, "rollback"), ("pause", "", 5, ""),
        ("rollback", "the program ended the run", 5, "stop"), ("rollback", "", 6, "stop"),  # by run.seconds
    ],
)  # fmt: skip
def test_trouble_in_the_evaluation_after_the_last_step_is_acted_on_too(
    tmp_path: Path, action: str, ended: str, steps: int, kind: str
) -> None:
    run = Run(tmp_path, steps=steps, action=action)
    for version, gold in enumerate(GOLD, 1):
        run.step(version)
        if version == 5 and ended:
            end(run, ended)
        run.evaluate(version, gold)
        run.act(at_end=version == 5)
    if action == "pause":
        assert run.kinds() == run.learner.made == [] and run.watchdog.note == "running"
        run.log.close()
        assert 3 in list_checkpoints(run.run_dir)
        return
    (event,) = read_events(run.run_dir)
    assert (event.kind, event.version, event.back_to, event.rules) == (kind, 5, 3, ("gold",))
    assert run.log.summary({})["ended"] == run.log.end_reason


@pytest.mark.parametrize(("steps", "ended"), [(BAD, ""), (100, "the program ended the run")])
def test_trouble_in_the_last_step_itself_does_not_pause_a_run_that_is_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: int, ended: str
) -> None:
    run = Run(tmp_path, steps=steps, action="pause")
    run.steps(BAD - 1)
    if ended:  # known before the last step is logged, which waits for other reports
        run.log.add("learner/0", TrainingEnded(version=BAD, reason=ended))
    run.step(BAD, is_bad=True)
    assert run.kinds() == run.learner.made == [] and run.watchdog.note == "running"
    assert f"async-rl export {checkpoint_folder(run.run_dir, 5)} OUT_DIR\n" in capsys.readouterr().out
    run.act(at_end=True)
    assert run.kinds() == []


def test_a_rollback_is_over_once_the_resumed_run_has_made_a_step(tmp_path: Path) -> None:
    first = troubled(tmp_path, "rollback")
    with next_life(first, 5) as again:
        assert again.kinds() == ["rollback"]
        again.step(6)
        assert again.kinds() == ["rollback", "resumed"]
