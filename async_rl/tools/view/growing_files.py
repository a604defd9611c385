"""Follows the files to which a run appends lines, metrics.jsonl and timeline.json, and keeps what its page shows."""

from __future__ import annotations

import json
import math
import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from async_rl.base.telemetry.metrics import PLAIN, Declaration, Figures, over_steps, read_declarations
from async_rl.base.telemetry.timeline import JOINED, RESTART, Span, state_changes, within

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
_start_s = attrgetter("start_s")
MAX_STEPS_BEHIND = 5
"""A pool's spans are written some time after the learner's. If a pool is further behind than this, it has ended."""
LEARNER, UPDATE, BATCH = "learner/0", "update", "batch"
"""The pool whose spans define steps, and the names of these spans: a step ends where the next wait for a batch begins.
"""


class GrowingFile:
    """A file that grows. Thread-safe. If a resume replaces the file, it is read again from the start.

    A subclass keeps what the lines say, in `_add`, and forgets it in `_forget`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._inode, self._offset = -1, 0
        self._forget()

    def _forget(self) -> None:
        """Make this object as it is before the first line."""
        raise NotImplementedError

    def _add(self, line: bytes) -> None:
        """Take in a line, which may be damaged."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Prepare for new lines."""

    def refresh(self) -> Self:
        """Read the lines added since the last call. Returns this object."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    found = os.fstat(file.fileno())
                    if found.st_ino != self._inode or found.st_size < self._offset:
                        self._inode, self._offset = found.st_ino, 0
                        self._forget()
                    if found.st_size > self._offset:
                        self._begin()
                    file.seek(self._offset)
                    for line in file:
                        if not line.endswith(b"\n"):
                            break  # half written
                        self._offset += len(line)
                        self._add(line)
            except OSError:
                pass  # not written yet, or just being replaced: the next call finds it
        return self


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


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a pool's lane with a single state. Times are in seconds from the start of the window."""

    state: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """The states of each pool over some steps."""

    first_step: int
    last_step: int
    duration_s: float
    step_ends_s: list[float]
    """The end of each step, in seconds from the start of the window."""
    lanes: dict[str, list[Segment]]
    waits_s: dict[str, float]
    """The seconds that learner/0 did not compute, by cause. Waits for a batch are split by the rollout pools'
    states meanwhile: `batch/busy`, `batch/sync` and so on."""


class TimelineFile(GrowingFile):
    """The spans in timeline.json so far."""

    def _forget(self) -> None:
        self._spans: dict[int, list[Span]] = {}
        """The spans of each pid."""
        self._pools: dict[int, str] = {}
        self._there: dict[int, list[tuple[float, float]]] = {}
        """For each pid that has joined: the times from joining to leaving. The last one may be open, with infinity."""
        self._is_complete = False
        """Whether the run has ended and closed the file."""

    def _add(self, line: bytes) -> None:
        self._is_complete = line == b"]}\n"
        if line.startswith((b'{"ph": "X"', b'{"ph": "M"', b'{"ph": "i"')):
            with suppress(ValueError, KeyError, TypeError):  # damaged: one event is missing in its lane
                self._add_event(json.loads(line.rstrip(b",\n")))

    def _add_event(self, event: dict[str, Any]) -> None:
        pid = int(event["pid"])
        if event["ph"] == "M":
            if event["name"] == "process_name":
                self._pools[pid] = str(event["args"]["name"])
            return
        start_s = event["ts"] / 1e6
        if event["ph"] == "i":
            there = self._there.setdefault(pid, [])
            if event["name"] == JOINED:
                there.append((start_s, inf))
            elif there:
                there[-1] = (there[-1][0], start_s)
            return
        end_s = (event["ts"] + event["dur"]) / 1e6
        name = "" if event["name"] == event["cat"] else str(event["name"])
        insort(self._spans.setdefault(pid, []), Span(str(pid), event["cat"], start_s, end_s, name), key=_start_s)

    def step_ends_s(self) -> list[float]:
        """Return the end of each step that can be shown, in seconds on the clock of the file."""
        with self._lock:
            return self._shown_ends_s()

    def _learner(self) -> list[Span]:
        pid = next((pid for pid, pool in self._pools.items() if pool == LEARNER), -1)
        return self._spans.get(pid, [])

    def _shown_ends_s(self) -> list[float]:
        """Return the end of each step for which the file has the states of all pools that are still running."""
        ends_s = step_ends_s(self._learner())
        if self._is_complete or not ends_s:
            return ends_s
        known_s = [max(span.end_s for span in spans[-16:]) for spans in self._spans.values()]
        oldest_s = ends_s[-min(len(ends_s), MAX_STEPS_BEHIND + 1)]
        until_s = min((end_s for end_s in known_s if end_s >= oldest_s), default=0.0)
        return ends_s[: bisect_right(ends_s, until_s)]

    def window(self, first: int, last: int, number_of_first: int) -> Window | None:
        """Return the lanes over the steps `first` to `last`, as far as the file has them; None if it has none of them.

        Args:
            number_of_first: the number of the first step in the file, 1 unless the run was resumed.
        """
        with self._lock:
            ends_s = self._shown_ends_s()
            first_index = max(0, first - number_of_first)
            last_index = min(last - number_of_first, len(ends_s) - 1)
            if last_index < first_index:
                return None
            learner = self._learner()
            # Before the first update the pools start up, which takes much longer than a step.
            first_update_s = next((span.start_s for span in learner if span.name == UPDATE), 0.0)
            start_s, end_s = ends_s[first_index - 1] if first_index else first_update_s, ends_s[last_index]
            lanes = {
                self._pools.get(pid, str(pid)): _segments(
                    _between(each, start_s, end_s), within(self._there.get(pid), start_s, end_s), start_s
                )
                for pid, each in self._spans.items()
            }
        segments = {pool: lanes[pool] for pool in sorted(lanes)}
        rollout = [of_pool for pool, of_pool in segments.items() if pool.startswith("rollout")]
        waiting = _between(learner, start_s, end_s)
        return Window(
            first_index + number_of_first, last_index + number_of_first, end_s - start_s,
            [end - start_s for end in ends_s[first_index : last_index + 1]],
            segments, _waits_s(waiting, start_s, end_s) | _batch_waits_s(waiting, rollout, start_s, end_s),
        )  # fmt: skip


def _between(spans: Sequence[Span], start_s: float, end_s: float) -> list[Span]:
    before = bisect_left(spans, end_s, key=_start_s)
    return [span for span in spans[:before] if span.end_s > start_s]


def step_ends_s(learner: Sequence[Span]) -> list[float]:
    """Return the end of each step in seconds: when the learner's last span before its next wait for a batch ends."""
    ends_s: list[float] = []
    has_trained, end_s = False, 0.0
    for span in learner:
        if span.name == BATCH and has_trained:
            ends_s.append(end_s)
            has_trained = False
        has_trained = has_trained or span.name == UPDATE
        end_s = max(end_s, span.end_s)
    return [*ends_s, end_s] if has_trained else ends_s


def _segments(spans: Sequence[Span], there: Sequence[tuple[float, float]], start_s: float) -> list[Segment]:
    """Return the states of one pool while it is there, without overlap.

    Args:
        there: the parts of the window while it is there.
        start_s: the start of the window.
    """
    starts_s = [span.start_s for span in spans]
    segments: list[Segment] = []
    for state, from_s, to_s in (each for part in there for each in state_changes(spans, *part)):
        middle_s = (from_s + to_s) / 2
        near = spans[max(0, bisect_right(starts_s, middle_s) - 16) : bisect_right(starts_s, middle_s)]
        name = next((s.name for s in reversed(near) if s.state == state and s.end_s > middle_s), "")
        last = segments[-1] if segments else None
        if last and (last.state, last.name, last.end_s) == (state, name, from_s - start_s):
            segments[-1] = Segment(state, name, last.start_s, to_s - start_s)
        else:
            segments.append(Segment(state, name, from_s - start_s, to_s - start_s))
    return segments


def _waits_s(learner: Sequence[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Return the learner's seconds by activity, except updates and waits for a batch."""
    waits_s: dict[str, float] = {}
    rest_s = end_s - start_s
    for span in learner:
        seconds = min(span.end_s, end_s) - max(span.start_s, start_s)
        rest_s -= seconds
        if span.name not in (UPDATE, BATCH):
            waits_s[span.name or span.state] = waits_s.get(span.name or span.state, 0.0) + seconds
    return waits_s | ({"other": rest_s} if rest_s > 1e-6 else {})


def _batch_waits_s(
    learner: Sequence[Span], rollout: Sequence[Sequence[Segment]], start_s: float, end_s: float
) -> dict[str, float]:
    """Return the learner's seconds of waiting for a batch, by what the rollout pools did meanwhile: `batch/STATE`.

    At each moment the pools that are there have equal weight. While a lost rollout server was restarted, its state is
    `restart`; while no server is there, the learner's state is `other`.
    """
    waits_s: dict[str, float] = {}
    for span in learner:
        if span.name != BATCH:
            continue
        first_s, last_s = max(span.start_s, start_s) - start_s, min(span.end_s, end_s) - start_s
        edges: list[tuple[float, int, str]] = []
        for segments in rollout:
            begin = bisect_right(segments, first_s, key=lambda segment: segment.end_s)
            end = bisect_left(segments, last_s, key=lambda segment: segment.start_s)
            for segment in segments[begin:end]:
                key = f"{BATCH}/{RESTART if segment.name == RESTART else segment.state}"
                edges += [(max(segment.start_s, first_s), 1, key), (min(segment.end_s, last_s), -1, key)]
        counts, cursor_s = Counter[str](), first_s
        for edge_s, change, key in [*sorted(edges), (last_s, 0, "")]:
            if edge_s > cursor_s:
                present = +counts or Counter([f"{BATCH}/other"])
                for each, count in present.items():
                    waits_s[each] = waits_s.get(each, 0.0) + (edge_s - cursor_s) * count / present.total()
                cursor_s = edge_s
            counts[key] += change
    return waits_s
