"""Reduction, metrics.jsonl, the console line, and the learning curve."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from async_rl.base.telemetry.metrics import Metric, read_metrics, reduce_metrics
from async_rl.base.telemetry.metrics_logger import MetricsLogger, format_step
from async_rl.base.telemetry.plots import smooth
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


def test_the_console_line_shows_what_was_measured_and_nothing_else() -> None:
    values = {"reward/mean": 0.51234, "staleness/mean": 0.75, "staleness/max": 2.0, "time/step_s": 1.25}
    assert format_step(7, 120, values) == "step   7/120  reward 0.512  staleness 0.75 max 2  1.25 s"


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


def test_a_terminal_gets_a_bar_with_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(
        write=(written := []).append, flush=lambda: None, isatty=lambda: True, encoding="utf-8",
    ))  # fmt: skip
    logger = MetricsLogger(CONFIG, tmp_path)
    logger.log(5, {"reward/mean": 0.5})
    logger.close()
    text = "".join(written)
    assert "reward 0.500" in text
    assert "5/20" in text


def test_smoothing_starts_without_bias_and_follows_a_constant() -> None:
    assert smooth([3.0, 3.0, 3.0], [1.0, 5.0, 0.1], span=5) == pytest.approx([3.0, 3.0, 3.0])
    # span 3: weights 1/2 on the newest, 1/4 on the one before, normalised by 3/4
    assert smooth([0.0, 3.0], [1.0, 1.0], span=3) == pytest.approx([0.0, 2.0])
    assert smooth([0.0, 3.0], [4.0, 1.0], span=3) == pytest.approx([0.0, 1.0])  # the long step counts more
