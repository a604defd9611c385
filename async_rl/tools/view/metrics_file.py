"""Follows a run's metrics.jsonl, and keeps the metrics that the page shows. Each call reads only the added lines."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from async_rl.base.telemetry.metrics import Figures, kind_of, over_steps

BLOCK_BYTES = 8 * 2**20
MAX_POINTS = 600
"""The most points of one line. A longer line is thinned before it is sent to the browser."""
MOST_STEPS = 20
"""A tile shows a mean over at most so many steps at the start of the run, and so many at its end."""

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
"""The charts of a run: the metrics on its left and right axis, and the left one's ends (None: by the data) and format
for Bokeh's NumeralTickFormatter."""
_LINES = {key for chart in CHARTS for key, _ in (*chart["lines"], *chart.get("right", ()))}
KEYS = _LINES | {"time/written_at_s", "time/since_first_step_s", "batch/episodes", "batch/response_tokens"}
"""The metrics that are kept, and all that begin with `alarm/`. Those behind _LINES weigh the others in means."""


class MetricsFile:
    """The metrics of one run by key and step. Thread-safe. A resume replaces the file, which is then read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._inode = -1
        self._offset = 0
        self._values: dict[str, dict[float, float]] = {}

    def refresh(self) -> MetricsFile:
        """Read the lines that were added since the last call. Returns this object."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    self._read(file)
            except OSError:
                pass  # not written yet, or just being replaced: the next call finds it
        return self

    def _read(self, file: Any) -> None:
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._inode, self._offset, self._values = found.st_ino, 0, {}
        file.seek(self._offset)
        rest = b""
        while block := file.read(BLOCK_BYTES):
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            step = float(record["step"])
        except (ValueError, TypeError, KeyError):
            return  # a damaged line: its step is missing in the charts
        for key, value in record.items():
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number and (key in KEYS or key.startswith("alarm/")):
                self._values.setdefault(key, {})[step] = float(value)

    def values(self, key: str) -> list[tuple[float, float]]:
        """Return (step, value) of one metric in the order of the steps; the later of two values of one step counts."""
        with self._lock:
            return sorted(self._values.get(key, {}).items())

    def last(self, key: str) -> float | None:
        """Return the value of the metric at its last step; None if it was never measured."""
        values = self.values(key)
        return values[-1][1] if values else None

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 before the first one."""
        with self._lock:
            return int(max(self._values.get("time/written_at_s", {}), default=0))

    def start_and_now(self) -> tuple[Figures, Figures, int]:
        """Return the figures of the first and the last steps, and the number of steps in the first ones.

        The first ones are a fifth of all steps. Both are at most MOST_STEPS.
        """
        with self._lock:
            steps = sorted(self._values.get("time/written_at_s", {}))
            number = max(1, min(MOST_STEPS, len(steps) // 5))
            parts = steps[:number], steps[-MOST_STEPS:]
            start, now = (
                over_steps({key: of_key.get(step) for key, of_key in self._values.items()} for step in part)
                for part in parts
            )
        return start, now, number

    def alarms(self) -> dict[str, tuple[bool, int]]:
        """Return, for each alarm that was ever on, whether it is on now, and the last step when it was."""
        with self._lock:
            keys = [key for key in self._values if key.startswith("alarm/")]
        found = {}
        for key in sorted(keys):
            values = self.values(key)
            if steps := [step for step, value in values if value > 0]:
                found[key.removeprefix("alarm/").replace("_", " ")] = values[-1][1] > 0, int(steps[-1])
        return found

    def charts(self) -> list[dict[str, Any]]:
        """Return CHARTS with the points of each line; lines that nothing has measured are left out."""
        found = []
        for chart in CHARTS:
            lines = [
                {"name": name, "is_right": side == "right", **thinned(key, points)}
                for side in ("lines", "right") for key, name in chart.get(side, ()) if (points := self.values(key))
            ]  # fmt: skip
            found.append({"axis": (None, None), **chart, "lines": lines})
        return found


def thinned(key: str, points: Sequence[tuple[float, float]]) -> dict[str, list[float]]:
    """Return the lists `step` and `value` of at most MAX_POINTS points.

    A point for several steps has the last of them, and their mean, or the largest value of a metric such as
    `staleness/max`.
    """
    stride = math.ceil(len(points) / MAX_POINTS)
    joined = max if kind_of(key).how == "max" else mean
    parts = [points[at : at + stride] for at in range(0, len(points), max(1, stride))]
    values = [float(f"{joined([value for _, value in part]):.5g}") for part in parts]
    return {"step": [part[-1][0] for part in parts], "value": values}
