"""trackio gets the metrics of every step if it is asked for, and can't end a run."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.telemetry.metrics import MetricsLogger
from async_rl.telemetry.trackio_run import TrackioRun, open_trackio_run
from tests.kit.configs import changed, make_config

CONFIG = make_config(logging={"wandb": "disabled", "trackio": True})


def test_trackio_gets_every_record_with_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    run = SimpleNamespace(
        log=lambda values, step: logged.append((values, step)), finish=lambda: logged.append(({}, -1))
    )
    options: dict[str, Any] = {}
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=lambda **kwargs: options.update(kwargs) or run))  # type: ignore[arg-type]
    logger = MetricsLogger(CONFIG, tmp_path)
    logger.log(1, {"reward/mean": 0.5, "broken": math.nan})
    logger.close()
    values, step = logged[0]
    assert (values["reward/mean"], step, "broken" in values, "step" in values) == (0.5, 1, False, False)
    assert logged[-1] == ({}, -1)
    assert (options["project"], options["resume"]) == ("async-rl", "allow")
    assert options["config"] == dataclasses.asdict(CONFIG)


def test_a_resumed_run_goes_on_in_trackio_and_another_of_its_name_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    trackio = SimpleNamespace(init=lambda **options: names.append(options["name"]))
    monkeypatch.setitem(sys.modules, "trackio", trackio)  # type: ignore[arg-type]
    for folder in ("one", "one", "other"):
        (tmp_path / folder).mkdir(exist_ok=True)
        open_trackio_run(CONFIG, tmp_path / folder, pytest.fail)
    assert names[0] == names[1] != names[2]
    assert all(name.startswith(f"{CONFIG.run.name}-") for name in names)


def test_trackio_is_not_imported_when_it_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # importing it raises
    assert open_trackio_run(changed(CONFIG, logging={"trackio": False}), tmp_path, pytest.fail) is None
    assert not list(tmp_path.iterdir())


def test_without_trackio_the_run_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    notes: list[str] = []
    assert open_trackio_run(CONFIG, tmp_path, notes.append) is None
    assert notes == ["trackio: off, it is not installed. Run: pip install trackio"]


def test_a_failure_of_trackio_is_noted_once_and_turns_it_off() -> None:
    notes: list[str] = []

    def fail(values: object, step: int) -> None:
        raise OSError("disk full")

    run = TrackioRun(SimpleNamespace(log=fail, finish=pytest.fail), notes.append)
    run.log({"step": 1})
    run.log({"step": 2})
    run.close()
    assert notes == ["trackio: off from here on, the run goes on: OSError: disk full"]
