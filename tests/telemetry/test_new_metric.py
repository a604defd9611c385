"""A metric of a loss from outside the packages reaches every place by its declaration alone."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from async_rl.base.config.loading import load_config
from async_rl.base.messages.reports import StepDone, WorkerReport
from async_rl.base.run_dir.run_dir import write_config
from async_rl.base.seams import Loss
from async_rl.base.telemetry.metrics import Metric
from async_rl.base.telemetry.status import NORMAL_END, write_status
from async_rl.base.telemetry.timeline import Span
from async_rl.run.log.run_log import RunLog
from async_rl.tools.sweeps.report import write_report
from async_rl.tools.view.growing_files import MetricsFile
from learner.algorithms.diagnostics import MetricAccumulator, add_loss_metrics, loss_metrics
from learner.algorithms.losses import LossInputs, LossOutput, TokenMetric
from tests.kit.view.client import Client

KEY = "loss/surprise"
SURPRISES = ([[1.0, 5.0], [9.0, 2.0]], [[3.0, 4.0], [0.5, 1.0]], [[7.0, 8.0], [2.0, 6.0]])
"""[step][micro-batch][token]; the last token of each step is not trained."""
LARGEST = (9.0, 4.0, 8.0)


def surprising(x: LossInputs) -> LossOutput:
    """The plain policy gradient, and the largest -log p of a token, in nats; over steps, the smallest of these."""
    surprise = TokenMetric(-x.logprobs, reduce="max", over_steps="min", unit="nats")
    return LossOutput(-x.advantages * x.logprobs, torch.zeros_like(x.trained), {"surprise": surprise})


SURPRISING = Loss(function=surprising)


def metrics_of_step(step: int) -> list[Metric]:
    """Return the metrics that the learner makes of what the loss has returned for two micro-batches."""
    sums = MetricAccumulator()
    for number, surprises in enumerate(SURPRISES[step]):
        x: Any = SimpleNamespace(
            logprobs=-torch.tensor(surprises), advantages=torch.ones(2), trained=torch.tensor([True, number == 0])
        )
        add_loss_metrics(sums, surprising(x).metrics, x.trained)
        sums.add(policy_tokens=x.trained.sum())
    return loss_metrics(sums, sums.reduce())


@pytest.fixture
def in_wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A wandb that keeps what it is sent: `lines`, and the `summary`."""
    run = SimpleNamespace(lines=[], summary={}, define_metric=lambda *_, **__: None, finish=lambda: None)
    run.log = run.lines.append
    library = SimpleNamespace(__spec__=object(), Settings=dict, init=lambda **_: run)
    monkeypatch.setitem(sys.modules, "wandb", library)  # type: ignore[arg-type]
    return run


def test_a_metric_of_a_users_loss_is_in_wandb_on_the_page_and_in_the_report(
    tmp_path: Path, one_rank: None, in_wandb: Any
) -> None:
    folder = tmp_path / "run"
    config = load_config(None, [
        "model.path=none", "task.name=reasoning_gym/none", f"run.dir={tmp_path}", "run.name=run",
        f"algorithm.loss={__name__}:SURPRISING", "logging.wandb=offline", "run.steps=3",
    ])  # fmt: skip
    log = RunLog(config)
    write_config(config)
    for step in range(3):
        metrics = (*metrics_of_step(step), Metric("staleness/max", 0.0, "max"))
        spans = (Span("learner/0", "busy", 10.0 * step, 10.0 * step + 10),)
        served = (Span("rollout/0", "busy", 10.0 * step, 10.0 * step + 10),)
        log.add("rollout/0", WorkerReport(spans=served))
        log.add("learner/0", StepDone(version=step + 1, metrics=metrics, spans=spans))
    summary = log.summary({})
    log.close()
    (folder / "summary.json").write_text(json.dumps(summary))
    write_status(folder, [], NORMAL_END)

    logged = [json.loads(line)[KEY] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert tuple(logged) == LARGEST
    assert tuple(line[KEY] for line in in_wandb.lines) == LARGEST and in_wandb.summary[KEY] == min(LARGEST)
    (shown,) = [each for each in MetricsFile(folder / "metrics.jsonl").refresh().every_metric() if each["key"] == KEY]
    assert shown == {
        "key": KEY, "last": LARGEST[-1], "figure": min(LARGEST), "over_steps": "min", "by": "", "unit": "nats"
    }
    assert KEY in Client(folder).get("./").text
    write_report(folder)
    with (folder / "metrics.csv").open(newline="") as file:
        (row,) = [row for row in csv.reader(file) if row[0] == KEY]
    assert row[1:3] == ["min", "nats"] and float(row[3]) == min(LARGEST)
    assert f"<td>{KEY}</td><td>min</td><td>nats</td><td>4" in (folder / "report.html").read_text()
