"""TensorBoard gets the metrics of every step if it is asked for, and can't end a run."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_rl.base.config import Config
from async_rl.base.telemetry.metrics_logger import MetricsLogger
from tests.kit.configs import changed, make_config
from tests.kit.runs import make_checkpoint

CONFIG = make_config(logging={"wandb": "disabled", "tensorboard": True})


def events(run_dir: Path) -> Iterator[Any]:
    """The events of a run's files: records of length, checksum, protobuf, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted((run_dir / "tensorboard").glob("events.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            yield Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]


def scalars(run_dir: Path) -> list[tuple[str, int, float]]:
    """(key, step, value) of each scalar but times."""
    found = [(value.tag, event.step, value.simple_value) for event in events(run_dir) for value in event.summary.value]
    return [each for each in found if not each[0].startswith("time/")]


def resumed(run_dir: Path, version: int) -> Config:
    """The config of a resume from a checkpoint of a version, which is made here."""
    return changed(CONFIG, run={"resume": str(make_checkpoint(run_dir, version))})


def test_the_event_files_hold_every_finite_metric_of_each_step(tmp_path: Path) -> None:
    logger = MetricsLogger(CONFIG, tmp_path)
    logger.log(1, {"reward/mean": 0.5, "broken": math.nan})
    logger.log(2, {"reward/mean": 0.75})
    logger.close()
    assert not any(event.HasField("session_log") for event in events(tmp_path))
    logger = MetricsLogger(resumed(tmp_path, 2), tmp_path)
    logger.begin_lineage()
    logger.log(3, {"reward/mean": 1.0})
    logger.close()
    assert scalars(tmp_path) == [("reward/mean", 1, 0.5), ("reward/mean", 2, 0.75), ("reward/mean", 3, 1.0)]


def test_a_resume_that_makes_a_step_hides_those_that_it_discards(tmp_path: Path) -> None:
    """TensorBoard drops what it has read so far from the step of a session's start on."""
    from tensorboardX.proto.event_pb2 import SessionLog

    logger = MetricsLogger(CONFIG, tmp_path)
    for step in (1, 2, 3):
        logger.log(step, {"reward/mean": 0.5})
    logger.close()
    before = list(events(tmp_path))
    config = resumed(tmp_path, 1)
    logger = MetricsLogger(config, tmp_path)
    logger.log(1, {"eval/accuracy": 0.25})  # the evaluation that was due is made once more
    logger.close()
    assert list(events(tmp_path)) == before, "a resume without a step is undone"
    logger = MetricsLogger(config, tmp_path)
    logger.log(1, {"eval/accuracy": 0.25})
    logger.begin_lineage()
    logger.log(2, {"reward/mean": 0.75})
    logger.close()
    since = list(events(tmp_path))[len(before) :]
    starts = [n for n, event in enumerate(since) if event.HasField("session_log")]
    assert [(since[n].step, since[n].session_log.status) for n in starts] == [(2, SessionLog.START)]
    assert starts[0] < min(n for n, event in enumerate(since) if event.summary.value)
    assert scalars(tmp_path)[-2:] == [("eval/accuracy", 1, 0.25), ("reward/mean", 2, 0.75)]
