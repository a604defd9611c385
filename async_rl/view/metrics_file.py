"""Follows a run's metrics.jsonl: each call reads only the lines that were added, and half-written lines are left."""

from __future__ import annotations

import json
import math
import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from async_rl.telemetry.figures import Figure, Figures, kind_of, over_steps

MAX_POINTS = 1500
"""A series with more points is thinned before it is sent to the browser."""
BLOCK_BYTES = 8 * 2**20
RECENT_STEPS = 20


@dataclass(slots=True)
class Column:
    """One metric: its values in the order of the file, each with its step and the number of its line, from 1 on."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))
    lines: array[int] = field(default_factory=lambda: array("q"))

    def by_step(self, after_line: int = 0, newest: int = 0) -> dict[float, float]:
        """Return the values of the lines behind `after_line`; of two values of one step the later one counts.

        Args:
            newest: the number of values to look at, from the end; 0: all.
        """
        first = max(bisect_right(self.lines, after_line), len(self.lines) - newest if newest else 0)
        pairs = zip(self.steps[first:], self.values[first:], strict=True)
        return {step: value for step, value in pairs if not math.isnan(value)}


class MetricsFile:
    """The metrics of one run by key. Safe to use from many threads.

    A resume replaces the file. It is then read again from its start, and `generation` counts up.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._inode = -1
        self._offset = 0
        self._columns: dict[str, Column] = {}
        self.generation = 0
        self.lines = 0
        """The number of complete lines that were read."""
        self.broken_lines = 0
        """The number of complete lines that are not a JSON object with a step."""

    def refresh(self) -> MetricsFile:
        """Read the lines that were added since the last call; returns this object."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    self._begin_again_if_replaced(file)
                    file.seek(self._offset)
                    rest = b""
                    while block := file.read(BLOCK_BYTES):
                        *lines, rest = (rest + block).split(b"\n")
                        for line in lines:
                            self._offset += len(line) + 1
                            self._add(line)
            except OSError:
                return self  # not written yet, or just being replaced: the next call finds it
        return self

    def _begin_again_if_replaced(self, file: Any) -> None:
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._offset:
            self.generation += self._inode >= 0
            self._inode, self._offset, self._columns = found.st_ino, 0, {}
            self.lines = self.broken_lines = 0

    def _add(self, line: bytes) -> None:
        self.lines += 1
        if not line.strip():
            return
        try:
            record = json.loads(line)
            step = float(record["step"])
        except (ValueError, TypeError, KeyError):
            self.broken_lines += 1
            return
        for key, value in record.items():
            if key == "step" or isinstance(value, str | list | dict):
                continue
            column = self._columns.setdefault(key, Column())
            column.steps.append(step)
            column.values.append(math.nan if value is None else float(value))
            column.lines.append(self.lines)

    @property
    def keys(self) -> list[str]:
        with self._lock:
            return sorted(self._columns)

    def values(self, key: str, after_line: int = 0) -> dict[float, float]:
        """Return the values of one metric by step, of the lines behind `after_line`; empty if none has measured it."""
        with self._lock:
            column = self._columns.get(key)
            return dict(sorted(column.by_step(after_line).items())) if column else {}

    def last(self, key: str) -> float | None:
        """Return the value of the metric at its last step; None if it was never measured."""
        with self._lock:
            column = self._columns.get(key)
            if not column:
                return None
            return next((value for value in reversed(column.values) if not math.isnan(value)), None)

    def recent(self) -> Figures:
        """Return the figures of all metrics over the last RECENT_STEPS steps that were logged."""
        with self._lock:
            columns = {key: column.by_step(newest=2 * RECENT_STEPS) for key, column in self._columns.items()}
        steps = sorted(columns.get("time/written_at_s", {}))[-RECENT_STEPS:]
        return over_steps({key: of_key.get(step) for key, of_key in columns.items()} for step in steps)

    @property
    def last_step(self) -> int:
        """The last step that was logged; 0 before the first one."""
        with self._lock:
            column = self._columns.get("time/written_at_s")
            return int(max(column.steps)) if column and column.steps else 0

    def series(self, keys: Iterable[str], after_line: int = 0) -> dict[str, dict[str, Any]]:
        """Return, by key, the lists `step`, `value` and `weight` of the lines behind `after_line`, at most MAX_POINTS.

        Lines are not in the order of the steps: that of an evaluation follows later steps than the evaluated one.

        `weight` is what a value counts in a mean over steps, such as the time of its step. `stride` is the number of
        values that each point stands for: points further apart have a gap between them.
        """
        found: dict[str, dict[str, Any]] = {}
        known, weights_of = self.keys, cache(self.values)  # many keys have the same weights
        for key in keys:
            weights = [weights_of(weight) for weight in kind_of(key).weight_keys(known)]
            values = self.values(key, after_line)
            points = thinned(key, [(s, v, sum(each.get(s, 0.0) for each in weights)) for s, v in values.items()])
            found[key] = {
                "step": [step for step, _, _ in points], "value": [value for _, value, _ in points],
                "weight": [weight for _, _, weight in points], "stride": max(1, math.ceil(len(values) / MAX_POINTS)),
            }  # fmt: skip
        return found


Point = tuple[float, float, float]
"""(step, value, weight of the value)"""


def thinned(key: str, points: Sequence[Point]) -> Sequence[Point]:
    """Return at most MAX_POINTS points in place of the given ones of the metric `key`.

    Each stands for equally many points in a row: it has the step of the last of them and the figure of their values.
    Where no point has a weight, all count the same.
    """
    stride = math.ceil(len(points) / MAX_POINTS)
    if not any(weight for _, _, weight in points):
        points = [(step, value, 1.0) for step, value, _ in points]
    if stride <= 1:
        return points
    ends = range(len(points), 0, -stride)
    return [_joined(key, points[max(0, end - stride) : end]) for end in ends][::-1]


def _joined(key: str, points: Sequence[Point]) -> Point:
    figure = Figure(kind_of(key).of_one_step)
    for _, value, weight in points:
        figure.add(value, weight)
    return points[-1][0], figure.value(), figure.weight
