"""The names of `import async_rl`: a program is told of its run, asks it to save or to end, and gets its errors."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import async_rl
from async_rl import pipeline
from async_rl.api import config_to_start, evaluation_config
from async_rl.base.config import Config
from async_rl.base.errors import ProcessDiedError
from async_rl.base.run_dir.run_dir import new_run_dir, write_config
from async_rl.run.processes.signals import RunControl, StopSignals
from tests.kit.runs import make_checkpoint

SETTINGS: dict[str, Any] = {"model": {"path": "a-model"}, "task": {"path": "a.parquet"}}


class Remote:
    """A method of an actor; it keeps what it is called with."""

    def __init__(self, told: list[tuple[str, ...]], name: str) -> None:
        self._told, self._name = told, name

    def remote(self, *arguments: str) -> None:
        self._told.append((self._name, *arguments))


class FakeLearner:
    """Takes the place of the learner's actor."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ...]] = []
        self.end, self.save = Remote(self.told, "end"), Remote(self.told, "save")


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> FakeLearner:
    """A pipeline that logs three steps, the second after an evaluation, unless it is asked to end before."""
    learner = FakeLearner()

    def run(config: Config, signals: StopSignals, *, control: RunControl) -> dict[str, Any]:
        control.connect(learner)
        for version in (1, 2, 3):
            control.on_step(version, {"reward/mean": version / 10, **({"eval/accuracy": 0.5} if version == 2 else {})})
        return {"steps": 3, "bound": config.staleness.max, "resume": config.run.resume}

    monkeypatch.setattr(pipeline, "run", run)
    return learner


def test_each_callback_gets_each_step_in_order_and_the_summary_comes_back(learner: FakeLearner) -> None:
    seen: list[tuple[str, int, float | None]] = []
    callbacks = [
        lambda step, name=name: seen.append((name, step.version, step.metrics.get("eval/accuracy"))) for name in "ab"
    ]
    assert async_rl.train(SETTINGS, ["staleness.max=3"], callbacks=callbacks)["bound"] == 3
    assert seen == [(name, version, 0.5 if version == 2 else None) for version in (1, 2, 3) for name in "ab"]


def test_what_a_program_asks_for_reaches_the_learner_also_from_before_its_start(learner: FakeLearner) -> None:
    run = async_rl.TrainingRun(SETTINGS)
    run.end("good enough")
    with run:
        for step in run:
            if step.version == 2:
                run.save()
    assert learner.told == [("end", "good enough"), ("save",)]
    assert run.summary["steps"] == 3


def test_a_run_can_be_started_where_an_event_loop_is_running(learner: FakeLearner) -> None:
    async def cell() -> dict[str, Any]:
        return async_rl.train(SETTINGS)

    assert asyncio.run(cell())["steps"] == 3


def begin(run_dir: Path, version: int = 5, **settings: Any) -> dict[str, Any]:
    """Make the directory of a run that has a checkpoint, and return its settings."""
    settings = {**SETTINGS, **settings, "run": {"dir": str(run_dir.parent), "name": run_dir.name, "steps": 7}}
    make_checkpoint(run_dir, version)
    write_config(async_rl.load_config(settings))
    return settings


def test_resume_auto_starts_a_run_goes_on_with_it_and_has_the_summary_of_its_end(
    learner: FakeLearner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {**SETTINGS, "run": {"dir": str(tmp_path), "name": "job", "steps": 7}}
    assert async_rl.train(settings, resume="auto")["resume"] == ""
    (tmp_path / "job").mkdir()
    assert new_run_dir(async_rl.load_config(settings)).name == "job-2"
    begin(tmp_path / "job-2")
    assert async_rl.train(settings, resume="auto")["resume"] == str(tmp_path / "job-2")
    (tmp_path / "job-2" / "summary.json").write_text('{"steps": 7, "accuracy_end": 0.5}')
    with async_rl.TrainingRun(async_rl.load_config(settings), resume="auto") as run:
        assert list(run) == []
    assert run.summary == {"steps": 7, "accuracy_end": 0.5} and run.run_dir == tmp_path / "job-2"
    assert f"{tmp_path}/job-2" in capsys.readouterr().out
    (tmp_path / "job-2" / "summary.json").write_text('{"steps": 5, "ended": "the watcher ended the run: entropy."}')
    assert async_rl.train(settings, resume="auto")["steps"] == 5
    assert "the watcher ended the run: entropy" in capsys.readouterr().out
    (tmp_path / "job-2" / "summary.json").unlink()
    begin(tmp_path / "job-2", version=7)
    assert async_rl.train(settings, resume="auto")["resume"] == str(tmp_path / "job-2"), "its end is left to do"


def test_a_run_is_continued_with_its_own_configuration_unless_one_is_given(
    learner: FakeLearner, tmp_path: Path
) -> None:
    begin(tmp_path / "before", staleness={"max": 4})
    summary = async_rl.train(resume=tmp_path / "before")
    assert (summary["bound"], summary["resume"]) == (4, str(tmp_path / "before"))
    assert async_rl.train(None, ["staleness.max=3"], resume=tmp_path / "before")["bound"] == 3
    assert async_rl.train({**SETTINGS, "staleness": {"max": 6}}, resume=tmp_path / "before")["bound"] == 6


@pytest.mark.parametrize("name", ["2024", "a #3", "a: b"])
def test_a_run_or_a_model_is_found_whatever_yaml_reads_in_its_path(name: str) -> None:
    assert config_to_start(SETTINGS, (), name)[0].run.resume == name
    assert evaluation_config(name, SETTINGS).model.path == name


@pytest.mark.parametrize("resume", ["", "auto"])
def test_neither_a_configuration_nor_a_run_to_continue_is_refused(resume: str) -> None:
    with pytest.raises(async_rl.ConfigError, match=r"^config "):
        async_rl.train(resume=resume)
    with pytest.raises(async_rl.ConfigError, match="nowhere"):
        async_rl.train(resume="nowhere")


def test_a_run_that_has_begun_is_not_begun_again_and_leaves_the_signals_alone(learner: FakeLearner) -> None:
    before = signal.getsignal(signal.SIGINT)
    with async_rl.TrainingRun(SETTINGS) as run:
        within = signal.getsignal(signal.SIGINT)
        with pytest.raises(RuntimeError), run:
            pass
        assert signal.getsignal(signal.SIGINT) is within is not before
    with pytest.raises(RuntimeError):
        run.__enter__()
    assert signal.getsignal(signal.SIGINT) is before and list(run) == []


def test_leaving_the_loop_by_break_ends_the_run_with_the_block(learner: FakeLearner) -> None:
    with async_rl.TrainingRun(SETTINGS) as run:
        for _ in run:
            break
        assert learner.told == []
    assert learner.told == [("end", "the program left its loop over the steps")] and run.summary["steps"] == 3
    learner.told.clear()
    with async_rl.TrainingRun(SETTINGS):
        pass
    with async_rl.TrainingRun(SETTINGS) as run:
        assert [step.version for step in run] == [1, 2, 3]
    assert learner.told == []


def test_an_end_also_holds_for_the_learner_with_which_a_rollback_goes_on(learner: FakeLearner) -> None:
    control, next_learner = RunControl(), FakeLearner()
    control.connect(learner)
    control.save()
    control.end("good enough")  # which comes too late: the watcher has just told this learner to stop
    control.disconnect()
    control.end("the program left its loop over the steps")
    control.save()
    control.connect(next_learner)
    assert learner.told == [("save",), ("end", "good enough")]
    assert next_learner.told == [("end", "good enough"), ("save",)]


def test_a_setting_that_cannot_work_is_refused_before_anything_starts() -> None:
    with pytest.raises(async_rl.ConfigError, match=r"^staleness\.max "):
        async_rl.train({**SETTINGS, "staleness": {"max": -1}})
    with pytest.raises(RuntimeError):
        list(async_rl.TrainingRun(SETTINGS))


def pipeline_that(monkeypatch: pytest.MonkeyPatch, go: Callable[[StopSignals, RunControl], None]) -> None:
    def run(config: Config, signals: StopSignals, *, control: RunControl) -> dict[str, Any]:
        go(signals, control)
        return {}

    monkeypatch.setattr(pipeline, "run", run)


def test_the_error_of_a_run_is_raised_in_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def go(signals: StopSignals, control: RunControl) -> None:
        control.on_step(1, {})
        raise ProcessDiedError("learner/0 died")

    pipeline_that(monkeypatch, go)
    steps: list[int] = []
    with pytest.raises(async_rl.AsyncRLError, match=r"^learner/0 died$"):
        async_rl.train(SETTINGS, callbacks=[lambda step: steps.append(step.version)])
    assert steps == [1]


def test_the_error_of_a_callback_ends_the_run_with_its_step_and_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def go(signals: StopSignals, control: RunControl) -> None:
        with signals.deferred(asked.set):
            control.on_step(1, {})
            assert asked.wait(20)
        raise KeyboardInterrupt("resume with ...")

    pipeline_that(monkeypatch, go)
    with pytest.raises(ZeroDivisionError):
        async_rl.train(SETTINGS, callbacks=[lambda step: 1 / 0])
    assert asked.is_set()


def test_a_model_without_a_configuration_beside_it_is_not_evaluated(tmp_path: Path) -> None:
    with pytest.raises(async_rl.ConfigError, match="nothing"):
        async_rl.evaluate(tmp_path / "nothing")
    with pytest.raises(async_rl.ConfigError, match="CONFIG"):
        async_rl.evaluate(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(async_rl.ConfigError, match=rf"{tmp_path}/model"):
        async_rl.evaluate(tmp_path)


@pytest.mark.parametrize(("folder", "model"), [(".", "model"), ("model", "."), (".", "models/step_2")])
def test_a_model_is_evaluated_by_the_configuration_of_the_run_that_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, model: str
) -> None:
    begin(tmp_path, staleness={"max": 6})
    (tmp_path / folder / model).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / folder)
    assert evaluation_config(model, None).staleness.max == 6
