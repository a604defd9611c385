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
    """The part of a report that contains times: what the process did when, and by which clock."""

    spans: tuple[Span, ...] = ()
    samples: tuple[Sample, ...] = ()
    clock: str = field(default_factory=clock_id)
    """The name of the monotonic clock that measured all times in this report."""
    sent_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(TimedReport):
    """A learner rank has trained on one batch and finished what was due after it, such as the weight push."""

    version: int
    """The policy version that the step produced, 1..run.steps."""
    metrics: tuple[Metric, ...] = ()
    """The metrics of all ranks together. Only rank 0 reports them."""
    examples: tuple[Example, ...] = ()
    """Example answers of the batch; empty with logging.wandb disabled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersLost:
    """A weight push has dropped rollout servers that did not answer or serve other weights. The driver restarts them.

    A dropped server gets no more weights, even if it is still alive.
    """

    servers: tuple[tuple[str, int], ...]
    """(name, number of its start) of each dropped server."""
    cause: str = ""
    """The error that made the push fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServersFilled:
    """Rollout servers that have joined serve the learner's weights now."""

    servers: tuple[tuple[str, int], ...]
    """(name, number of its start) of each server."""
    version: int
    """The policy version of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDue:
    """All servers have got `version`, and a held-out evaluation of this version is due."""

    version: int
    servers: tuple[str, ...] = ()
    """The evaluation servers that evaluate; they serve this version meanwhile. Empty: a rollout server evaluates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSkipped:
    """A held-out evaluation of `version` was due, but is skipped."""

    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded(TimedReport):
    """Training has ended before run.steps: nothing is left to learn, or the user or a program has ended it."""

    version: int
    reason: str
    """Why training ended. Empty: a resume found that all of run.steps were trained."""
    is_stop: bool = False
    """Whether the user or the driver stopped the learner. Then the run is not complete, and no model was saved."""
    metrics: tuple[Metric, ...] = ()
    """The metrics measured after the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport(TimedReport):
    """The measurements of a rollout worker since its last report."""

    metrics: tuple[Metric, ...] = ()
    notes: tuple[str, ...] = ()
    """Lines for the console, such as the first error of a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutAnswer:
    """One answer to a held-out question, as text."""

    question: str
    answer: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone(TimedReport):
    """The result of a held-out evaluation; without metrics if the task has no held-out set."""

    version: int
    """The policy version that the engine served when the evaluation began."""
    metrics: tuple[Metric, ...] = ()
    answers: tuple[HeldOutAnswer, ...] = ()
    """One answer to each of the first questions, for the end of the run."""


LearnerReport = StepDone | ServersLost | ServersFilled | EvaluationDue | EvaluationSkipped | TrainingEnded
Report = LearnerReport | WorkerReport
