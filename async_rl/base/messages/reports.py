"""The messages that the processes of a run send to the driver: events, measurements, and a few example answers.

The driver acts on the events of learner rank 0, and logs the spans and samples of all ranks. A rollout worker sends a
WorkerReport twice a second, and EvaluationDone in answer to a request for an evaluation.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from async_rl.base.telemetry.metrics import Metric
from async_rl.base.telemetry.timeline import Sample, Span, clock_id

if TYPE_CHECKING:
    from async_rl.base.telemetry.examples import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedReport:
    """The part of a report that has times: what the process did when, and whose clock says so."""

    spans: tuple[Span, ...] = ()
    samples: tuple[Sample, ...] = ()
    clock: str = field(default_factory=clock_id)
    """The name of the monotonic clock of all times in this report."""
    sent_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(TimedReport):
    """A learner rank has trained one batch and finished what was due after it, such as the weight push."""

    version: int
    """Policy version that the step produced, 1..run.steps."""
    metrics: tuple[Metric, ...] = ()
    """The metrics of all ranks together; reported by rank 0 alone."""
    examples: tuple[Example, ...] = ()
    """Example answers of the batch; empty with logging.wandb disabled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersLost:
    """A weight push has dropped the rollout servers that did not answer, or serve other weights; the driver restarts
    them.

    A dropped server gets no more weights, even if it is still alive.
    """

    servers: tuple[tuple[str, str], ...]
    """(name, URL) of each dropped server."""
    cause: str = ""
    """The error with which the push failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDue:
    """Every rollout server serves `version`, and a held-out evaluation of this version is due."""

    version: int
    servers: tuple[str, ...] = ()
    """The evaluation servers that make it: they serve this version until it ends. Empty: a rollout server makes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSkipped:
    """A held-out evaluation of `version` was due, and is not made."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded(TimedReport):
    """Training has ended before run.steps: there is nothing left to learn, or the user or a program has ended it."""

    version: int
    reason: str
    """Empty: a resume has found all of run.steps trained."""
    is_stop: bool = False
    """Whether the user or the driver has stopped the learner, so that the run is not over and has saved no model."""
    metrics: tuple[Metric, ...] = ()
    """The metrics measured after the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport(TimedReport):
    """The measurements of a rollout worker since its last report."""

    metrics: tuple[Metric, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines for the console, such as the first error of a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone(TimedReport):
    """The result of a held-out evaluation; without metrics if the task has no held-out set."""

    version: int
    """Policy version that the engine served when the evaluation began."""
    metrics: tuple[Metric, ...] = ()


LearnerReport = StepDone | ServersLost | EvaluationDue | EvaluationSkipped | TrainingEnded
Report = LearnerReport | WorkerReport
