"""Predicts the utilisation of a run with the simulator, from the durations that it measured so far."""

from __future__ import annotations

from typing import Any

from async_rl.errors import AsyncRLError
from async_rl.view.run_files import RunFiles
from benchmarks.prediction import Measured, compare
from benchmarks.results import Run, rows_of

LEAST_STEPS = 5
KEYS = (
    "time/train_s", "time/wait_data_s", "time/push_s", "push/pause_s", "rollout/group_s", "rollout/group_s_squared",
    "rollout/concurrency", "rollout/groups", "rollout/failed", "rollout/aborted", "time/since_first_step_s",
    "staleness/mean", "staleness/max",
)  # fmt: skip
"""The metrics that the simulator is fed with, and those that its prediction stands beside."""
MEANS = ("utilisation/learner", "utilisation/rollout", "utilisation/rollout/sync", "occupancy/rollout")


def predict(run: RunFiles) -> Measured | None:
    """Return the measured utilisation and staleness of a run so far, beside those that the simulator predicts for it.

    It is None if the run has fewer than LEAST_STEPS steps or no fixed staleness bound, or lacks a metric. The field
    `predicted` is None if the simulator does not cover the run's rules.
    """
    metrics = run.metrics.refresh()
    columns = {key: metrics.values(key) for key in KEYS}
    numbers = list(metrics.values("staleness/max"))
    bound = run.setting("staleness.max")
    if len(numbers) < LEAST_STEPS or not isinstance(bound, int):
        return None
    steps: list[dict[str, float | None]] = [
        {"step": number, **{key: of_key.get(number) for key, of_key in columns.items()}} for number in numbers
    ]
    summary: dict[str, Any] = {key: _mean(list(metrics.values(key).values())[1:]) for key in MEANS}
    summary |= {
        "seconds": metrics.last("time/since_first_step_s"),
        "staleness_mean": _mean(list(columns["staleness/mean"].values())[1:]),
        "staleness_max": max(columns["staleness/max"].values()),
        "buffer": {key: metrics.last(key) or 0.0 for key in metrics.keys if key.startswith("buffer/")},
    }
    if not summary["seconds"] or "buffer/trained" not in summary["buffer"]:
        return None
    labels = {"staleness": str(bound), "seed": str(run.setting("run.seed", 0))}
    measured = Run(labels, summary, steps, [], run.folder, run.setting("staleness.mode") == "exact")
    try:
        found = compare(rows_of([measured]))
    except (AsyncRLError, KeyError, ValueError, ZeroDivisionError, OSError):
        return None  # a run of another version may lack what the simulator needs
    return found[0] if found else None


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else float("nan")
