from __future__ import annotations

import json
from pathlib import Path

from async_rl.config import Config, LoggingConfig, ModelConfig, RunConfig, TaskConfig
from async_rl.metrics import Metric, Report, read_metrics
from async_rl.runlog import RunLog
from async_rl.timeline import Span


def make_log(tmp_path: Path) -> RunLog:
    return RunLog(
        Config(
            model=ModelConfig(path="none"), task=TaskConfig(name="reasoning_gym/chain_sum"),
            run=RunConfig(name="r", dir=str(tmp_path)), logging=LoggingConfig(wandb="disabled"),
        )
    )


def learner_step(step: int, start_s: float, end_s: float) -> Report:
    span = Span("learner/0", "busy", start_s, end_s)
    return Report(step=step, metrics=(Metric("reward/mean", float(step)),), spans=(span,))


def lines(tmp_path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (tmp_path / "r" / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_logged_once_the_rollout_pool_has_reported_beyond_its_end(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.add("learner/0", learner_step(1, 0.0, 10.0))
    log.add("learner/0", learner_step(2, 10.0, 20.0))
    log.add("rollout/0", Report(step=1, spans=(Span("rollout/0", "busy", 0.0, 15.0),)))
    assert [line["step"] for line in lines(tmp_path)] == [1]
    assert log.has_open_steps
    log.add("rollout/0", Report(step=2, spans=(Span("rollout/0", "wait_weights", 15.0, 25.0),)))
    assert not log.has_open_steps
    second = lines(tmp_path)[1]
    assert second["utilisation/learner"] == 1.0
    assert second["utilisation/rollout"] == 0.5  # busy for 5 of the 10 seconds
    log.close()


def test_steps_that_were_open_at_a_crash_are_in_the_metrics_file(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.add("learner/0", learner_step(1, 0.0, 10.0))
    log.close()
    assert [(line["step"], line["reward/mean"]) for line in lines(tmp_path)] == [(1, 1.0)]
    assert (tmp_path / "r" / "timeline.json").exists()


def test_what_a_push_after_the_last_step_took_has_a_line_of_its_own(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.add("learner/0", learner_step(1, 0.0, 10.0))
    pushed = (Metric("push/bytes", 7.0, "sum"),)
    log.add("learner/0", Report(step=1, metrics=pushed, note="the task is solved"))
    log.close()
    (record,) = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert (record["reward/mean"], record["late/push/bytes"]) == (1.0, 7.0)
    assert len(log.steps) == 1
