"""The tokens a second of a step are those that it was trained on."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.driver.run_log import RunLog
from async_rl.messages.reports import StepDone, WorkerReport
from async_rl.telemetry.metrics import Metric
from async_rl.telemetry.timeline import Span
from tests.kit.configs import make_config
from tests.kit.runs import logged


@pytest.mark.parametrize(
    ("left_out", "tokens"),
    [({"staleness/masked_fraction": 0.75}, 150.0), ({"policy/skipped_batches": 1.0}, 0.0)],
)
def test_tokens_that_are_masked_for_their_age_or_in_a_skipped_batch_are_not_trained(
    left_out: dict[str, float], tokens: float, tmp_path: Path
) -> None:
    log = RunLog(make_config(run={"name": "r", "dir": str(tmp_path)}, logging={"wandb": "disabled"}))
    for step in (1, 2):
        metrics = (Metric("batch/response_tokens", 600.0), *(Metric(key, value) for key, value in left_out.items()))
        span = Span("learner/0", "busy", step * 10.0 - 10, step * 10.0)
        log.add("learner/0", StepDone(version=step, metrics=metrics, spans=(span,)))
        log.add("rollout/0", WorkerReport(spans=(Span("rollout/0", "busy", step * 10.0 - 10, step * 10.0 + 1),)))
    log.close()
    assert logged(tmp_path / "r")[-1]["throughput/trained_tokens_per_s"] == pytest.approx(tokens / 10)
