"""Accounting of time: the share of its time that each pool spent in each state, computed from spans.

Pools are named `learner/<rank>`, `rollout/<index>` and `eval/<index>`. Every instant of a pool counts as exactly one
state, so the shares of a pool add up to 1. Times are in seconds of `time.monotonic()`, which is the same for all
processes of a host.

The definition of busy, for measurements and predictions:
    learner   the rank computes an update
    rollout   at least one group is in flight (granted, and not yet in the buffer), and no push delays it
    eval      a held-out evaluation is running, and no push delays it
The occupancy of a busy rollout pool, its running requests divided by its slots, is a Sample and not a state.

The driver maps the times of other hosts to its own clock by `HostClocks`, and writes everything to a file by
`ChromeTrace`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self, get_args

from async_rl.base.telemetry.metrics import TIME, Metric

State = Literal["busy", "wait_data", "wait_weights", "sync", "eval", "checkpoint", "other"]
STATES: tuple[State, ...] = get_args(State)

PRIORITY: tuple[State, ...] = ("sync", "eval", "checkpoint", "busy", "wait_weights", "wait_data", "other")
"""When spans of one pool overlap, an instant counts as the first of these states."""

RESTART = "restart"
"""The name of the span, in the state `other`, while a lost rollout server is restarted."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval [start_s, end_s) while `pool` is in one state. `name` describes the activity, or is empty."""

    pool: str
    state: State
    start_s: float
    end_s: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A value in 0..1 of `pool`, measured at one instant; `name` is `occupancy` or `gpu`."""

    pool: str
    name: str
    time_s: float
    value: float


class Timeline:
    """Collects the spans of one pool. It may be used from many threads and coroutines."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._spans: list[Span] = []
        self._open: list[tuple[State, str, float]] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, state: State, name: str = "") -> Iterator[None]:
        """A context whose time is recorded as a span of this pool, even if it raises."""
        entry = (state, name, time.monotonic())
        with self._lock:
            self._open.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(entry)
            self.add(state, entry[2], time.monotonic(), name)

    def now(self) -> tuple[State, str, float]:
        """Return (state, name, start) of the innermost open `span`; if none is open, ("other", "", now)."""
        with self._lock:
            return self._open[-1] if self._open else ("other", "", time.monotonic())

    def add(self, state: State, start_s: float, end_s: float, name: str = "") -> None:
        """Record a span. `end_s` must not be before `start_s`."""
        span = Span(self._pool, state, start_s, end_s, name)
        with self._lock:
            self._spans.append(span)

    def drain(self) -> tuple[Span, ...]:
        """Return the spans recorded since the last call, and delete them."""
        with self._lock:
            spans, self._spans = tuple(self._spans), []
        return spans


class Usage:
    """For a window of time: the share that each pool spent in each state, and the mean of each kind of sample.

    Each pool has its own window: the part of the time while it was there. Time without a span counts as `other`.
    Where spans overlap, PRIORITY decides. So the shares of a pool add up to 1.
    """

    def __init__(self) -> None:
        self._window_s = 0.0
        self._absent_s: dict[str, float] = {}
        """For how much of the window each pool was not there."""
        self._spent_s: dict[str, dict[State, float]] = {}
        """The time that each pool spent in each state, except in the state `other`."""
        self._samples: dict[str, tuple[float, int]] = {}
        """The sum and the number of the samples, by the key of their metric."""

    def add(
        self, spans: Iterable[Span], samples: Iterable[Sample], start_s: float, end_s: float,
        pools: Iterable[str] = (), there: Mapping[str, Sequence[tuple[float, float]]] | None = None,
    ) -> Self:
        """Extend the window by the time [start_s, end_s), with start_s < end_s; returns this object.

        `spans` are cut to that time; `samples` outside it are left out. A pool whose spans are all outside that time
        was in the state `other`.

        Args:
            pools: further pools, which were in the state `other` if they have no span.
            there: [pool] the intervals while it was there. A pool without an entry was there all the time.
        """
        if not end_s > start_s:
            raise ValueError(f"a window must end after it starts, got start_s={start_s}, end_s={end_s}")
        by_pool: dict[str, list[Span]] = {pool: [] for pool in pools}
        for span in spans:
            by_pool.setdefault(span.pool, []).append(span)
        for pool, of_pool in by_pool.items():
            if pool not in self._spent_s:  # if it may join, it has joined just now
                self._absent_s[pool] = self._window_s if there and pool in there else 0.0
                self._spent_s[pool] = {}
            cut = within((there or {}).get(pool), start_s, end_s)
            self._absent_s[pool] += end_s - start_s - math.fsum(last_s - first_s for first_s, last_s in cut)
            spent_s = self._spent_s[pool]
            for window in cut:
                for state, first_s, last_s in state_changes(of_pool, *window):
                    if state != "other":
                        spent_s[state] = spent_s.get(state, 0.0) + last_s - first_s
        self._window_s += end_s - start_s
        for sample in samples:
            if start_s <= sample.time_s < end_s:
                key = f"{sample.name}/{_kind(sample.pool)}"
                total, number = self._samples.get(key, (0.0, 0))
                self._samples[key] = total + sample.value, number + 1
        return self

    def shares(self) -> dict[str, dict[State, float]]:
        """Return {pool: {state: share of its window}}, with every state, and pools sorted by name.

        Pools that were never there are left out.
        """
        shares: dict[str, dict[State, float]] = {}
        for pool, spent_s in sorted(self._spent_s.items()):
            if (window_s := self._there_s(pool)) <= 0:
                continue
            rest_s = max(0.0, window_s - sum(spent_s.values()))  # rounding may make it negative
            shares[pool] = {
                state: (rest_s if state == "other" else spent_s.get(state, 0.0)) / window_s for state in STATES
            }
        return shares

    def _there_s(self, pool: str) -> float:
        """Return the length of a pool's window, which is 0 if only rounding is left of it."""
        there_s = self._window_s - self._absent_s[pool]
        return there_s if there_s > 1e-12 * self._window_s else 0.0

    def metrics(self) -> list[Metric]:
        """Return the metrics of utilisation. A pool's kind is the part of its name before `/`.

        `utilisation/<kind>` is the mean busy share over the kind's pools, `utilisation/<kind>/<state>` the mean share
        of another state, `utilisation/total` the mean busy share over all pools. Pools are weighted by their windows,
        whose sums are `pools/<kind>_s` and `pools/total_s`. They are also the weights of the steps in a mean over
        steps: a step with more servers counts for more. `<name>/<kind>` is the mean of all samples with that name in
        the kind's pools.
        """
        shares = self.shares()
        kinds = {_kind(pool): [other for other in shares if _kind(other) == _kind(pool)] for pool in shares}
        metrics = []

        def add(kind: str, pools: Sequence[str], states: Iterable[State]) -> None:
            there_s = [self._there_s(pool) for pool in pools]
            together = Metric(f"pools/{kind}_s", math.fsum(there_s), "sum", unit="s")
            metrics.append(together)
            for state in states:
                key = f"utilisation/{kind}" if state == "busy" else f"utilisation/{kind}/{state}"
                share = fmean((shares[pool][state] for pool in pools), there_s)
                metrics.append(Metric(key, share, by=together.key, unit="share"))

        for kind, pools in kinds.items():
            add(kind, pools, STATES)
        if shares:
            add("total", [*shares], ["busy"])
        for key, (total, number) in self._samples.items():
            kind = key.rpartition("/")[2]
            by = f"pools/{kind}_s" if kind in kinds else TIME
            metrics.append(Metric(key, total / number, by=by, unit="share"))
        return metrics


def within(
    there: Sequence[tuple[float, float]] | None, start_s: float, end_s: float
) -> list[tuple[float, float]]:
    """Return the parts of [start_s, end_s) while a pool was there.

    Args:
        there: the intervals while it was there; None: it was there all the time.
    """
    if there is None:
        return [(start_s, end_s)]
    cut = [(max(from_s, start_s), min(to_s, end_s)) for from_s, to_s in there]
    return [(from_s, to_s) for from_s, to_s in cut if from_s < to_s]


def state_changes(spans: Iterable[Span], start_s: float, end_s: float) -> Iterator[tuple[State, float, float]]:
    """Yield the states of one pool over [start_s, end_s) as (state, from, to), without gap or overlap.

    Where spans overlap, the first state in PRIORITY counts. Time without a span is `other`.
    """
    edges: list[tuple[float, int, State]] = []
    for span in spans:
        first_s, last_s = max(span.start_s, start_s), min(span.end_s, end_s)
        if first_s < last_s:
            edges += [(first_s, 1, span.state), (last_s, -1, span.state)]
    edges.sort(key=lambda edge: edge[0])

    running = dict.fromkeys(STATES, 0)
    cursor_s = start_s
    for edge_s, change, state in [*edges, (end_s, 0, "other")]:
        if edge_s > cursor_s:
            yield next((s for s in PRIORITY if running[s]), "other"), cursor_s, edge_s
        running[state] += change
        cursor_s = edge_s


def _kind(pool: str) -> str:
    return pool.partition("/")[0]


REPORTS_COMPARED = 600
"""The number of a host's last reports, a few minutes' worth, of which the quickest gives the difference of the clocks.
"""


@cache
def clock_id() -> str:
    """Return a name for this process's monotonic clock. Two processes with the same name have the same clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return platform.node()


class HostClocks:
    """Converts times of other hosts' monotonic clocks to this process's clock.

    A report takes some time to arrive, so arrival - sending exceeds the difference of the clocks, by least for the
    quickest report.
    """

    def __init__(self) -> None:
        self._differences_s: dict[str, deque[float]] = {}

    def behind_s(self, clock: str, sent_s: float) -> float:
        """Return the seconds to add to times of `clock` to get times of this process's clock.

        Args:
            clock: the `clock_id` of the process whose report arrives now.
            sent_s: that process's time.monotonic() when it made the report.
        """
        if clock == clock_id():
            return 0.0
        found = self._differences_s.setdefault(clock, deque(maxlen=REPORTS_COMPARED))
        found.append(time.monotonic() - sent_s)
        return min(found)


_SLICE = '{"ph": "X"'
JOINED, LEFT = "joined", "left"
"""The names of the instants in a trace at which a pool joins and leaves. A pool without them is there all the time."""


class ChromeTrace:
    """A file of Trace Event JSON that is written during the run, one event per line, so that events need no memory.

    In the trace each pool is a process. Its spans are distributed over threads (lanes) so that spans of one thread do
    not overlap, because a trace viewer draws only nested slices. Samples are counters. That a pool joins or leaves is
    an instant.

    Args:
        origin_s: time.monotonic() at the start of the trace's clock; no span starts earlier.
    """

    def __init__(self, path: Path, origin_s: float) -> None:
        self._path = path
        self._origin_s = origin_s
        self._file = path.open("w", encoding="utf-8")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        self._separator = "\n"
        self._pids: dict[str, int] = {}
        self._lanes: dict[str, list[int]] = {}
        """For each pool, the end of the last span of each lane, in microseconds."""
        self._counters: dict[tuple[str, str], float] = {}
        """The last value of each counter, by (pool, name)."""

    def add(self, spans: Iterable[Span], samples: Iterable[Sample]) -> None:
        """Write spans and samples to the file.

        Samples that repeat a value are left out, because a counter keeps its value.
        """
        for span in sorted(spans, key=lambda span: (span.pool, span.start_s, span.end_s)):
            start_us, end_us = self._microseconds(span.start_s), self._microseconds(span.end_s)
            ends_us = self._lanes.setdefault(span.pool, [])
            lane = next((i for i, lane_end_us in enumerate(ends_us) if lane_end_us <= start_us), len(ends_us))
            ends_us[lane : lane + 1] = [end_us]
            self._write(
                "X", span.pool, tid=lane, name=span.name or span.state, cat=span.state, ts=start_us,
                dur=end_us - start_us,
            )
        for sample in samples:
            counter = (sample.pool, sample.name)
            if self._counters.get(counter) != sample.value:
                self._counters[counter] = sample.value
                ts = self._microseconds(sample.time_s)
                self._write("C", sample.pool, ts=ts, name=sample.name, args={sample.name: sample.value})
        self._file.flush()  # the page of the run shows it now

    def mark(self, pool: str, name: str, time_s: float) -> None:
        """Write that a pool has JOINED or LEFT at `time_s`."""
        self._write("i", pool, s="p", name=name, ts=self._microseconds(time_s))

    def clock_s(self, time_s: float) -> float:
        """Convert `time_s`, a value of time.monotonic(), to seconds on the clock of the trace."""
        return self._microseconds(time_s) / 1e6

    def spans(self) -> Iterator[Span]:
        """Read back all spans written so far. Their times are on the clock of the trace."""
        self._file.flush()
        pools = {pid: pool for pool, pid in self._pids.items()}
        with self._path.open(encoding="utf-8") as file:
            for line in file:
                if line.startswith(_SLICE):
                    e = json.loads(line.rstrip(",\n"))
                    yield Span(pools[e["pid"]], e["cat"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["name"])

    def close(self) -> None:
        """Complete the file with the order of the pools and the names of the lanes, and close it."""
        for index, pool in enumerate(sorted(self._pids), 1):
            self._write("M", pool, name="process_sort_index", args={"sort_index": index})
            for lane in range(len(self._lanes.get(pool, ()))):
                self._write("M", pool, tid=lane, name="thread_name", args={"name": f"{pool} lane {lane}"})
        self._file.write("\n]}\n")
        self._file.close()

    def _write(self, phase: str, pool: str, **fields: Any) -> None:
        if pool not in self._pids:
            self._pids[pool] = len(self._pids) + 1
            self._write("M", pool, name="process_name", args={"name": pool})
        event = {"ph": phase, "pid": self._pids[pool], **fields}
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"

    def _microseconds(self, time_s: float) -> int:
        return round((time_s - self._origin_s) * 1e6)
