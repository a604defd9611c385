"""TensorBoard gets the metrics of every step if it is asked for, and can't end a run."""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_rl.telemetry.metrics import MetricsLogger
from async_rl.telemetry.tensorboard_run import TensorboardRun, open_tensorboard_run
from tests.kit.configs import changed, make_config

CONFIG = make_config(logging={"wandb": "disabled", "tensorboard": True})


def events(folder: Path) -> Iterator[tuple[str, int, float]]:
    """(key, step, value) of each scalar in the event files: records of length, checksum, protobuf, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.glob("events.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            yield from ((value.tag, event.step, value.simple_value) for value in event.summary.value)
            data = data[16 + length :]


def test_the_event_files_hold_every_finite_metric_of_each_step(tmp_path: Path) -> None:
    logger = MetricsLogger(CONFIG, tmp_path)
    logger.log(1, {"reward/mean": 0.5, "broken": math.nan})
    logger.log(2, {"reward/mean": 0.75})
    logger.close()
    logger = MetricsLogger(changed(CONFIG, run={"resume": str(tmp_path)}), tmp_path)
    logger.log(3, {"reward/mean": 1.0})
    logger.close()
    found = [each for each in events(tmp_path / "tensorboard") if not each[0].startswith("time/")]
    assert sorted(found) == [("reward/mean", 1, 0.5), ("reward/mean", 2, 0.75), ("reward/mean", 3, 1.0)]


def test_tensorboard_is_neither_imported_nor_written_when_it_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)  # importing it raises
    assert open_tensorboard_run(changed(CONFIG, logging={"tensorboard": False}), tmp_path, pytest.fail) is None
    assert list(tmp_path.iterdir()) == []


def test_without_its_package_the_run_goes_on_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    notes: list[str] = []
    assert open_tensorboard_run(CONFIG, tmp_path, notes.append) is None
    needs = "it needs tensorboardX, not installed here. Run: pip install 'async-rl[tensorboard]'"
    assert notes == [f"tensorboard: off, {needs}"]


def test_a_failure_of_tensorboard_is_noted_once_and_turns_it_off() -> None:
    notes: list[str] = []

    def fail(key: str, value: float, step: int) -> None:
        raise OSError("disk full")

    run = TensorboardRun(SimpleNamespace(add_scalar=fail, close=pytest.fail), notes.append)
    run.log({"step": 1, "reward/mean": 1.0})
    run.log({"step": 2, "reward/mean": 1.0})
    run.close()
    assert notes == ["tensorboard: off from here on, the run goes on: OSError: disk full"]
