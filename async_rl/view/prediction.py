"""Predicts the utilisation of a run with the simulator, from the durations that it measured so far, in one thread."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from async_rl.errors import AsyncRLError
from async_rl.sweeps.prediction import Measured, compare
from async_rl.sweeps.results import Run
from async_rl.sweeps.settings import settings_of
from async_rl.telemetry.figures import over_steps
from async_rl.view.run_files import RunFiles

LEAST_STEPS = 5
MEASURED = ("utilisation/learner", "utilisation/rollout", "utilisation/rollout/sync", "occupancy/rollout")
KEYS = (
    "time/train_s", "time/wait_data_s", "buffer/waited_s", "time/push_s", "push/pause_s", "rollout/group_s",
    "rollout/group_s_squared", "rollout/concurrency", "rollout/groups", "rollout/failed", "rollout/aborted",
    "time/since_first_step_s", "staleness/mean", "staleness/max", "time/step_s", "batch/episodes", *MEASURED,
)  # fmt: skip
"""The metrics that the simulator is fed with, and those that its prediction stands beside."""


class Predictor:
    """Predicts one run in a thread, once for each state of its metrics, whoever asks and however often.

    Args:
        turn: the lock of all runs that one server shows. The simulator computes for seconds, so only one thread may.
    """

    def __init__(self, run: RunFiles, turn: threading.Lock) -> None:
        self._run = run
        self._turn = turn
        self._lock = threading.Lock()
        self._stamp = ""
        self._found: Future[Measured | None] | None = None

    def ask(self) -> Future[Measured | None]:
        """Return the prediction that is being computed; else the one of the files as they are now, begun if needed."""
        stamp = str(self._run.revision()["metrics"])
        with self._lock:
            if self._found is None or (self._found.done() and self._stamp != stamp):
                self._stamp, self._found = stamp, Future()
                threading.Thread(target=self._work, args=(self._found,), daemon=True, name="view-prediction").start()
            return self._found

    def _work(self, found: Future[Measured | None]) -> None:
        with self._turn:
            try:
                found.set_result(predict(self._run))
            except Exception as error:  # a fault: whoever waits for the prediction raises it
                found.set_exception(error)


def predict(run: RunFiles) -> Measured | None:
    """Return the measured utilisation and staleness of a run so far, beside those that the simulator predicts for it.

    It is None if the run has fewer than LEAST_STEPS steps or no fixed staleness bound, or lacks a metric. The field
    `predicted` is None if the simulator does not cover the run's rules.
    """
    metrics = run.metrics.refresh()
    columns = {key: metrics.values(key) for key in KEYS}
    numbers = list(metrics.values("staleness/max"))
    bound = run.bound
    if len(numbers) < LEAST_STEPS or bound is None:
        return None
    steps: list[dict[str, float | None]] = [
        {"step": number, **{key: of_key.get(number) for key, of_key in columns.items()}} for number in numbers
    ]
    figures = over_steps(steps)
    summary: dict[str, Any] = {key: value for key in MEASURED if (value := figures.get(key)) is not None}
    summary |= {
        "seconds": figures.total("time/step_s"),
        "staleness_mean": figures.get("staleness/mean"),
        "staleness_max": max(columns["staleness/max"].values()),
        "buffer": {key: metrics.last(key) or 0.0 for key in metrics.keys if key.startswith("buffer/")},
    }
    if not summary["seconds"] or "buffer/trained" not in summary["buffer"]:
        return None
    labels = {"staleness": str(bound), "seed": str(run.setting("run.seed", 0))}
    measured = Run(labels, summary, steps, [], run.folder, run.setting("staleness.mode") == "exact")
    try:
        found = compare(settings_of([measured]))
    except (AsyncRLError, KeyError, ValueError, ZeroDivisionError, OSError):
        return None  # a run of another version may lack what the simulator needs
    return found[0] if found else None
