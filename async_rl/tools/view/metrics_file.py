"""Follows a run's metrics.jsonl, and stores the metrics that the page shows."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from async_rl.base.telemetry.metrics import PLAIN, Declaration, Figures, over_steps, read_declarations
from async_rl.tools.view.growing_file import GrowingFile

MAX_POINTS = 600
"""The most points of a chart's line. Longer lines are thinned before they are sent to the browser."""
MOST_STEPS = 20
"""A tile compares means over the first and the last steps of the run, at most this many each."""

CHARTS: tuple[dict[str, Any], ...] = (
    {"title": "Reward", "format": "0.00",
     "lines": (("reward/mean", "reward"), ("eval/accuracy", "held-out accuracy"))},
    {"title": "Staleness, versions", "format": "0.0", "axis": (0, None),
     "lines": (("staleness/max", "max"), ("staleness/mean", "mean"))},
    {"title": "Utilisation", "format": "0%", "axis": (0, 1.03),
     "lines": (("utilisation/learner", "learner"), ("utilisation/rollout", "rollout"))},
    {"title": "ESS (left) and KL (right, nats a token)", "format": "0%", "axis": (0, 1.03),
     "lines": (("offpolicy/ess", "ESS / tokens"),),
     "right": (("offpolicy/kl_behaviour_proximal_k3", "KL since sampled"), ("kl/reference", "KL to reference"))},
    {"title": "Time of a step, seconds", "format": "0.0", "axis": (0, None),
     "lines": (("time/step_s", "step"), ("time/wait_data_s", "waits for a batch"), ("time/train_s", "update"),
               ("time/sync_s", "push"))},
    {"title": "Trained tokens a second", "format": "0,0", "axis": (0, None),
     "lines": (("throughput/trained_tokens_per_s", "tokens/s"),)},
)  # fmt: skip
"""The charts of a run: the metrics on the left and right axis, and for the left axis its range (None: from the
data) and its format for Bokeh's NumeralTickFormatter."""
_LINES = {key for chart in CHARTS for key, _ in (*chart["lines"], *chart.get("right", ()))}
KEYS = _LINES | {"time/written_at_s", "time/since_first_step_s"}
"""The metrics whose value at each step is stored, with the metrics that are their weights. Those that begin with
`alarm/` are stored too."""


class MetricsFile(GrowingFile):
    """The metrics of one run.

    The values at each step are stored only for the charts. Every metric has its last value, and its figure over the
    last MOST_STEPS lines of the file.
    """

    def _forget(self) -> None:
        self._values: dict[str, dict[float, float]] = {}
        self._last: dict[str, float] = {}
        self._recent: deque[dict[str, float]] = deque(maxlen=MOST_STEPS)
        self._declared: dict[str, Declaration] = {}
        self._kept = KEYS

    def _begin(self) -> None:
        self._declared = read_declarations(self._path.parent)
        self._kept = KEYS | {self._declared.get(key, PLAIN).by for key in KEYS}

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step = float(record["step"])
        except (ValueError, TypeError, KeyError):
            return  # a damaged line: its step is missing in the charts
        numbers = ((key, value) for key, value in record.items() if isinstance(value, int | float) and key != "step")
        values = {key: float(value) for key, value in numbers if math.isfinite(value)}
        self._last |= values
        self._recent.append(values)
        for key, value in values.items():
            if key in self._kept or key.startswith("alarm/"):
                self._values.setdefault(key, {})[step] = value

    def values(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) of a metric, ordered by step. If a step has several values, the last one counts."""
        with self._lock:
            return sorted(self._values.get(key, {}).items())

    def last(self, key: str) -> float | None:
        """Return the value of a metric at the last step that measured it; None if it was never measured."""
        values = self.values(key)
        return values[-1][1] if values else None

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 before the first one."""
        with self._lock:
            return int(max(self._values.get("time/written_at_s", {}), default=0))

    def start_and_now(self) -> tuple[Figures, Figures, int]:
        """Return (the figures over the first steps, the figures over the last steps, the number of first steps).

        The first steps are a fifth of all steps. Both parts have at most MOST_STEPS steps.
        """
        with self._lock:
            declared = dict(self._declared)
            steps = sorted(self._values.get("time/written_at_s", {}))
            number = max(1, min(MOST_STEPS, len(steps) // 5))
            parts = steps[:number], steps[-MOST_STEPS:]
            start, now = (
                over_steps(({key: of_key.get(step) for key, of_key in self._values.items()} for step in part), declared)
                for part in parts
            )
        return start, now, number

    def alarms(self) -> dict[str, tuple[bool, int]]:
        """Return, for each alarm that was ever on, (whether it is on now, the last step at which it was on)."""
        with self._lock:
            keys = [key for key in self._values if key.startswith("alarm/")]
        found = {}
        for key in sorted(keys):
            values = self.values(key)
            if steps := [step for step, value in values if value > 0]:
                found[key.removeprefix("alarm/").replace("_", " ")] = values[-1][1] > 0, int(steps[-1])
        return found

    def charts(self) -> list[dict[str, Any]]:
        """Return CHARTS with the points of each line. Lines without measured values are left out."""
        found, declared = [], self._declared
        for chart in CHARTS:
            lines = [
                {"name": name, "is_right": side == "right", **thinned(points, declared.get(key, PLAIN).over_steps)}
                for side in ("lines", "right") for key, name in chart.get(side, ()) if (points := self.values(key))
            ]  # fmt: skip
            found.append({"axis": (None, None), **chart, "lines": lines})
        return found

    def every_metric(self) -> list[dict[str, Any]]:
        """Return for every metric a dict with its `key`, `last` value, `figure`, and the fields of its declaration.

        The figure is None if the metric is not in the last MOST_STEPS lines.
        """
        with self._lock:
            figures = over_steps(self._recent, self._declared)
            return [
                {"key": key, "last": value, "figure": figures.get(key), **asdict(self._declared.get(key, PLAIN))}
                for key, value in sorted(self._last.items())
            ]


def thinned(points: Sequence[tuple[float, float]], over_steps: str = "mean") -> dict[str, list[float]]:
    """Return the lists `step` and `value` with at most MAX_POINTS points.

    A point that stands for several steps has the number of the last one, and their mean, or with `over_steps` max their
    largest value.
    """
    joined = max if over_steps == "max" else fmean
    stride = math.ceil(len(points) / MAX_POINTS)
    parts = [points[at : at + stride] for at in range(0, len(points), max(1, stride))]
    values = [float(f"{joined([value for _, value in part]):.5g}") for part in parts]
    return {"step": [part[-1][0] for part in parts], "value": values}
