"""Collects everything that a learner rank measures between two reports to the driver."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from async_rl.telemetry.metrics import Metric
from async_rl.telemetry.nvml import GpuSampler
from async_rl.telemetry.timeline import Sample, Span, Timeline

STEP_TIMES = {
    "batch": "time/wait_data_s", "update": "time/train_s", "push": "time/sync_s", "release memory": "time/sync_s",
    "drain": "time/drain_s", "held push": "time/held_by_eval_s",
}
"""By name of a span, the metric that counts the span's seconds."""


class Recorded(NamedTuple):
    """Everything that was measured between two calls of `Recorder.take`."""

    metrics: list[Metric]
    spans: tuple[Span, ...]
    """The spans of this rank, and the pauses of servers in its pushes."""
    samples: tuple[Sample, ...]


class Recorder:
    """Collects this rank's spans, its GPUs' load, and what its pushes measured."""

    def __init__(self, pool: str) -> None:
        self.timeline = Timeline(pool)
        self._gpus = GpuSampler(pool)
        self._metrics: list[Metric] = []
        self._spans: list[Span] = []

    def add(self, metrics: Iterable[Metric], spans: Iterable[Span] = ()) -> None:
        self._metrics += metrics
        self._spans += spans

    def take(self) -> Recorded:
        """Return everything that was measured since the last call."""
        recorded = Recorded(self._metrics, (*self.timeline.drain(), *self._spans), self._gpus.drain())
        self._metrics, self._spans = [], []
        return recorded

    def close(self) -> None:
        self._gpus.close()


def step_times(spans: Sequence[Span], pool: str) -> list[Metric]:
    """Return how the seconds of a step were spent, without checkpoints.

    `time/wait_data_s`: waiting for a batch; `time/train_s`: the update; `time/sync_s`: pushes, and taking the servers'
    memory; `time/drain_s` and `time/held_by_eval_s`, where there was any: waiting before a push.

    Args:
        pool: name of the pool whose spans count.
    """
    seconds = dict.fromkeys(("time/wait_data_s", "time/train_s", "time/sync_s"), 0.0)
    for span in spans:
        if span.pool == pool and (key := STEP_TIMES.get(span.name)):
            seconds[key] = seconds.get(key, 0.0) + span.end_s - span.start_s
    return [Metric(key, value, "sum") for key, value in seconds.items()]
