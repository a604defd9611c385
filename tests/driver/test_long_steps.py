"""A step with days of workers' reports, as while a pause holds the learner: what the driver keeps, and logs."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.driver import run_log, run_timeline
from async_rl.driver.run_log import RunLog
from async_rl.messages.reports import StepDone, WorkerReport
from async_rl.telemetry.metrics import Metric, reduce_metrics
from async_rl.telemetry.timeline import Sample, Span
from tests.kit.configs import make_config
from tests.kit.runs import logged

MOST, REPORTS = 1000, 6000


def report(number: int) -> WorkerReport:
    """One of a worker's reports, which come twice a second; groups arrived before every tenth."""
    start_s, has_groups = number / 2, number % 10 == 0
    metrics = [
        Metric("rollout/groups", float(has_groups), "sum"), Metric("rollout/seconds", 0.1, "sum"),
        Metric("rollout/most", number % 977 / 7, "max"), Metric("rollout/least", number % 977 / 7, "min"),
        Metric("rollout/newest", number / 7, "last"), Metric("rollout/in_flight", 0.1 * (number % 7)),
        *([Metric("group/reward", 0.3 * number, weight=number % 97)] if has_groups else []),
        Metric("group/none", 1.0, weight=0.0),
    ]
    samples = (
        Sample("rollout/0", "occupancy", start_s, number / REPORTS), Sample("rollout/0", "gpu", start_s, 0.25),
    )
    spans = (Span("rollout/0", "wait_weights", start_s, start_s + 0.5),)
    return WorkerReport(metrics=tuple(metrics), spans=spans, samples=samples)


def test_a_step_of_days_needs_no_more_memory_and_has_the_same_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "MOST_METRICS", MOST)
    monkeypatch.setattr(run_timeline, "MOST_SAMPLES", MOST)
    log = RunLog(make_config(run={"dir": tmp_path}))
    log.add("learner/0", StepDone(version=1))  # the first step has no utilisation
    reports = [report(number) for number in range(REPORTS)]
    for each in reports:
        log.add("rollout/0", each)
        assert max(len(log._since_step), len(log.timeline._samples)) <= MOST
    log.add("learner/0", StepDone(version=2, spans=(Span("learner/0", "busy", 0.0, REPORTS / 2),)))
    log.close()
    _, step = logged(tmp_path / "run")
    expected = reduce_metrics(metric for each in reports for metric in each.metrics)
    assert {key: step[key] for key in expected} == pytest.approx(expected, rel=1e-12)
    assert "group/none" not in step and step["rollout/groups"] == REPORTS / 10
    assert step["occupancy/rollout"] == pytest.approx(0.5, abs=0.01) and step["gpu/rollout"] == 0.25
