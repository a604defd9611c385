"""The names of `import async_rl`: a program is told of its run, asks it to save or to end, and gets its errors."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import async_rl
from async_rl import pipeline
from async_rl.api import config_to_start, evaluation_config
from async_rl.base.config import Config
from async_rl.base.errors import ProcessDiedError
from async_rl.base.run_dir.checkpoints import TrainingState, checkpoint_folder, write_training_state
from async_rl.base.run_dir.run_dir import new_run_dir, write_config
from async_rl.run.processes.signals import RunControl, StopSignals

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


def test_the_settings_given_are_not_changed_and_a_config_is_taken_as_it_is(learner: FakeLearner) -> None:
    settings = {**SETTINGS, "staleness": {"max": 2}}
    config = async_rl.load_config(settings, ["staleness.max=5"])
    assert settings["staleness"] == {"max": 2}
    assert async_rl.TrainingRun(config).config is config
    assert async_rl.TrainingRun(config, ["staleness.max=1"]).config.staleness.max == 1
    assert str(async_rl.TrainingRun(config, resume="runs/a").config.run.resume) == "runs/a"


def test_another_preset_over_a_config_is_that_of_its_settings_with_the_preset() -> None:
    config = async_rl.load_config(SETTINGS)
    wanted = async_rl.load_config(SETTINGS, ["algorithm.preset=ppo"])
    assert async_rl.TrainingRun(config, ["algorithm.preset=ppo"]).config == wanted


def begin(run_dir: Path, version: int = 5, **settings: Any) -> dict[str, Any]:
    """Make the directory of a run that has a checkpoint, and return its settings."""
    settings = {**SETTINGS, **settings, "run": {"dir": str(run_dir.parent), "name": run_dir.name, "steps": 7}}
    folder = checkpoint_folder(run_dir, version)
    folder.mkdir(parents=True)
    state = TrainingState(version=version, lineage=0, ranks=1, networks={}, kl_coef=0.0, buffer={})
    write_training_state(folder, state)
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


def test_what_is_asked_for_after_the_end_of_a_run_does_nothing(learner: FakeLearner) -> None:
    control = RunControl()
    control.connect(learner)
    control.disconnect()
    control.end("too late")
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


@pytest.mark.parametrize("signal_first", [True, False])
def test_the_error_of_a_callback_and_one_signal_do_not_end_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch, signal_first: bool
) -> None:
    asked, seen = threading.Event(), list[StopSignals]()

    def go(signals: StopSignals, control: RunControl) -> None:
        seen.append(signals)
        with signals.deferred(asked.set):
            control.on_step(1, {})
            assert asked.wait(20)
        if not signal_first:
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyboardInterrupt("resume with ...")

    def fail(step: async_rl.TrainedStep) -> None:
        if signal_first:
            os.kill(os.getpid(), signal.SIGTERM)
        raise ZeroDivisionError

    pipeline_that(monkeypatch, go)
    with pytest.raises(ZeroDivisionError):
        async_rl.train(SETTINGS, callbacks=[fail])
    assert seen[0].requested and not seen[0].at_once


def test_a_second_ctrl_c_ends_the_run_at_once_and_says_how_to_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    def go(signals: StopSignals, control: RunControl) -> None:
        control.on_step(1, {})
        assert begun.wait(20)
        with signals.deferred(lambda: os.kill(os.getpid(), signal.SIGINT)):
            os.kill(os.getpid(), signal.SIGINT)
            while not signals.at_once:
                threading.Event().wait(0.01)
        raise KeyboardInterrupt("resume with: async-rl train --resume runs/a")

    pipeline_that(monkeypatch, go)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        async_rl.train(SETTINGS, callbacks=[lambda step: begun.set()])
    assert signal.getsignal(signal.SIGINT) is before


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


def test_every_public_name_is_there_and_others_are_errors() -> None:
    assert all(getattr(async_rl, name) for name in async_rl.__all__)
    assert set(async_rl.__all__) <= set(dir(async_rl))
    with pytest.raises(AttributeError, match="nothing"):
        _ = async_rl.nothing  # type: ignore[attr-defined]


@pytest.mark.processes
def test_the_package_is_the_command_and_its_types_are_published() -> None:
    done = subprocess.run([sys.executable, "-m", "async_rl", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"async-rl {async_rl.__version__}\n"
    root = Path(async_rl.__file__).parents[1]
    tools = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in (name.rstrip("*") for name in tools["packages"]["find"]["include"]):
        assert (root / package / "py.typed").is_file() and "py.typed" in tools["package-data"][package], package
