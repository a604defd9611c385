"""Sums the learner's timeline over a step: how long it waited, trained, pushed, and so on."""

from __future__ import annotations

from collections.abc import Sequence

from async_rl.telemetry.metrics import Metric
from async_rl.telemetry.timeline import Span
from learner.rank_status import PAUSE

STEP_TIMES = {
    "batch": "time/wait_data_s", "update": "time/train_s", "push": "time/sync_s", "release memory": "time/sync_s",
    "drain": "time/drain_s", "held push": "time/held_by_eval_s", "eval push": "time/eval_push_s",
    PAUSE: "time/paused_s",
}
"""By name of a span, the metric that counts the span's seconds. The last four exist only if there was such a span."""


def step_times(spans: Sequence[Span]) -> list[Metric]:
    """Return the metrics named in STEP_TIMES: the seconds of a step that rank 0 waited, trained, pushed, and so on."""
    seconds = dict.fromkeys(("time/wait_data_s", "time/train_s", "time/sync_s"), 0.0)
    for span in spans:
        if span.pool == "learner/0" and (key := STEP_TIMES.get(span.name)):
            seconds[key] = seconds.get(key, 0.0) + span.end_s - span.start_s
    return [Metric(key, value, "sum") for key, value in seconds.items()]
