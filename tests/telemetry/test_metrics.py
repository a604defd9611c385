"""Reduction, metrics.jsonl, the console line, and the learning curve."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from async_rl.base.telemetry.metrics import Metric, read_metrics, reduce_metrics
from async_rl.base.telemetry.metrics_logger import MetricsLogger
from tests.kit.configs import make_config

CONFIG = make_config(run={"steps": 20}, logging={"wandb": "disabled"})


def test_each_reduction_gives_its_value() -> None:
    metrics = [
        *(Metric("mean", v, "mean", w) for v, w in ((1.0, 3.0), (5.0, 1.0))),
        *(Metric(name, v, name) for name in ("sum", "max", "min", "last") for v in (2.0, 7.0, 4.0)),  # type: ignore[arg-type]
    ]
    assert reduce_metrics(metrics) == {"mean": 2.0, "sum": 13.0, "max": 7.0, "min": 2.0, "last": 4.0}


def test_a_mean_of_nothing_has_no_value() -> None:
    assert reduce_metrics([Metric("a", 3.0, "mean", 0.0)]) == {}


def test_a_key_with_two_reductions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a' .*mean, sum"):
        reduce_metrics([Metric("a", 1.0), Metric("a", 1.0, "sum")])


def test_each_step_is_written_at_once_as_one_line_of_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = MetricsLogger(CONFIG, tmp_path / "new" / "run")
    logger.log(1, {"reward/mean": 0.5, "loss/policy": math.nan})
    (line,) = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert (record["step"], record["reward/mean"], record["loss/policy"]) == (1, 0.5, None)
    logger.note("a [note] with [brackets]")
    logger.close()
    logger.close()
    assert capsys.readouterr().out.splitlines() == ["step  1/20  reward 0.500", "a [note] with [brackets]"]


def test_a_late_evaluation_is_merged_into_its_step_when_read(tmp_path: Path) -> None:
    logger = MetricsLogger(CONFIG, tmp_path)
    logger.log(1, {"reward/mean": 0.1})
    logger.log(2, {"reward/mean": 0.2})
    logger.log_eval(1, {"eval/accuracy": 0.9})
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')  # the process died here
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["reward/mean"], first["eval/accuracy"]) == (0.1, 0.9)
    assert (second["step"], second["reward/mean"]) == (2, 0.2)
