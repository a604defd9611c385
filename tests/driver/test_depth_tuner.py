"""The driver leaves some steps out of what it measures for the depth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from async_rl.driver.depth_tuner import DepthTuner
from async_rl.messages.reports import EvaluationDue, StepDone
from async_rl.telemetry.metrics import Metric
from tests.kit.configs import make_config


@pytest.mark.parametrize(("servers", "measured"), [((), [3]), (("eval/0",), [2, 3])])
def test_a_step_beside_an_evaluation_is_measured_if_rollout_servers_do_not_make_it(
    servers: tuple[str, ...], measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: Any = SimpleNamespace(add_metrics=lambda metrics: None)
    processes: Any = SimpleNamespace(actors={})
    tuner = DepthTuner(make_config(staleness={"max": 4, "depth": "auto"}), processes, log)
    found: list[int] = []

    def add_step(version: int, values: Any, *, is_disturbed: bool) -> None:
        if not is_disturbed:
            found.append(version)

    monkeypatch.setattr(tuner._controller, "add_step", add_step)
    for version in (1, 2, 3):  # the first warms up; the evaluation ends beside the second
        tuner.add(StepDone(version=version, metrics=(Metric("time/step_s", 1.0),)), 1, is_evaluating=False)
        if version == 1:
            tuner.add(EvaluationDue(version=1, servers=servers), 1, is_evaluating=not servers)
    assert found == measured
