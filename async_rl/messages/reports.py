"""The messages that the processes of a run send to the driver: control and measurements, never data or weights.

    learner rank      StepDone after each step; ServersLost and EvaluationDue in between; TrainingEnded at an early end.
                      The driver acts on those of rank 0, and takes the spans and samples of all ranks.
    rollout worker    WorkerReport twice a second; EvaluationDone in answer to a request for an evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_rl.telemetry.metrics import Metric
from async_rl.telemetry.timeline import Sample, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """A learner rank has trained one batch and taken part in everything that was due after it."""

    version: int
    """Policy version that the step produced, 1..run.steps."""
    metrics: tuple[Metric, ...] = ()
    """Those of all ranks together, reported by rank 0 alone."""
    alarms: tuple[str, ...] = ()
    """Conditions that began with this step, one line for the console each; reported by rank 0 alone."""
    spans: tuple[Span, ...] = ()
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersLost:
    """A push has dropped rollout servers: alive or not, they get no weights any more."""

    servers: tuple[tuple[str, str], ...]
    """(name, URL) of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDue:
    """Every server serves `version`, and a held-out evaluation of it is due."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded:
    """Training is over before run.steps: there is nothing left to learn, or the user has stopped the run."""

    version: int
    reason: str
    metrics: tuple[Metric, ...] = ()
    """The metrics measured after the last step; only rank 0 reports them."""
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """The measurements of a rollout worker since its last report."""

    metrics: tuple[Metric, ...] = ()
    spans: tuple[Span, ...] = ()
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone:
    """The result of a held-out evaluation; without metrics if the task has no held-out set."""

    version: int
    """Policy version that the engine served when the evaluation began."""
    metrics: tuple[Metric, ...] = ()
    spans: tuple[Span, ...] = ()


LearnerReport = StepDone | ServersLost | EvaluationDue | TrainingEnded
Report = LearnerReport | WorkerReport
