"""Where the time of each pool goes: spans in, exact shares and a Chrome trace out.

Pools are named `learner/<rank>` and `rollout/<index>`. Every instant of a pool is exactly one state, so the
shares of a pool add up to 1. Times are seconds of `time.time()`, which processes of one machine share.

Busy, for measurement and prediction alike:
    learner   it computes an update
    rollout   at least one rollout group is in flight (granted, and not yet in the buffer), and no push holds it up
How full a busy rollout pool is says its occupancy, running requests over slots: a Sample, not a state.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args

State = Literal["busy", "wait_data", "wait_weights", "sync", "eval", "checkpoint", "other"]
STATES: tuple[State, ...] = get_args(State)

PRIORITY: tuple[State, ...] = ("sync", "eval", "checkpoint", "busy", "wait_weights", "wait_data", "other")
"""Which state an instant counts as when spans of one pool overlap: the first of these."""


@dataclass(frozen=True, slots=True)
class Span:
    """What `pool` did in [start_s, end_s)."""

    pool: str
    state: State
    start_s: float
    end_s: float
    name: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A share in 0..1 of `pool`, read at one instant; `name` is `occupancy` or `gpu`."""

    pool: str
    name: str
    time_s: float
    value: float


class Timeline:
    """Collects the spans of one pool; safe to use from many threads and coroutines."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._spans: list[Span] = []
        self._open: list[tuple[State, float]] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, state: State, name: str = "") -> Iterator[None]:
        """The body's duration, recorded also when it raises."""
        entry = (state, time.time())
        with self._lock:
            self._open.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(entry)
            self.add(state, entry[1], time.time(), name)

    def now(self) -> tuple[State, float]:
        """What the pool does now, and since when: the innermost open `span`."""
        with self._lock:
            return self._open[-1] if self._open else ("other", time.time())

    def add(self, state: State, start_s: float, end_s: float, name: str = "") -> None:
        """A clock that was set back in between makes an empty span, never a negative one."""
        span = Span(self._pool, state, start_s, max(start_s, end_s), name)
        with self._lock:
            self._spans.append(span)

    def drain(self) -> tuple[Span, ...]:
        """All spans since the last call; each is handed out once."""
        with self._lock:
            spans, self._spans = tuple(self._spans), []
        return spans


def shares(spans: Iterable[Span], pool: str, start_s: float, end_s: float) -> dict[State, float]:
    """Share of [start_s, end_s) that `pool` spent in each state; every state is a key.

    Uncovered time is `other`, overlaps go by PRIORITY. The shares are ratios of exact sums: they add up to 1
    but for the rounding of seven floats. Raises ValueError on an empty window.
    """
    total = dict.fromkeys(STATES, Fraction(0))
    for state, first_s, last_s in state_changes(spans, pool, start_s, end_s):
        total[state] += Fraction(last_s) - Fraction(first_s)
    window = Fraction(end_s) - Fraction(start_s)
    return {state: float(part / window) for state, part in total.items()}


def state_changes(
    spans: Iterable[Span], pool: str, start_s: float, end_s: float
) -> Iterator[tuple[State, float, float]]:
    """(state, from, to) over [start_s, end_s) without gap or overlap, under the rules of `shares`."""
    if not end_s > start_s:
        raise ValueError(f"the window must end after it starts, got start_s={start_s}, end_s={end_s}")
    edges: list[tuple[float, int, State]] = []
    for span in spans:
        first_s, last_s = max(span.start_s, start_s), min(span.end_s, end_s)
        if span.pool == pool and first_s < last_s:
            edges += [(first_s, 1, span.state), (last_s, -1, span.state)]
    edges.sort(key=lambda edge: edge[0])

    running = dict.fromkeys(STATES, 0)
    cursor_s = start_s
    for edge_s, change, state in [*edges, (end_s, 0, "other")]:
        if edge_s > cursor_s:
            yield next((s for s in PRIORITY if running[s]), "other"), cursor_s, edge_s
        running[state] += change
        cursor_s = edge_s


def utilisation(spans: Iterable[Span], start_s: float, end_s: float) -> dict[str, float]:
    """Metric values over the window, one pool kind being the part of a pool's name before `/`.

    `utilisation/<kind>` is the mean busy share over the kind's pools, `utilisation/<kind>/<state>` the mean
    share of every other state, `utilisation/total` the mean busy share over all pools. A pool counts if any
    of `spans` is its own, also one outside the window.
    """
    spans = tuple(spans)
    by_kind: dict[str, list[dict[State, float]]] = {}
    for pool in sorted({span.pool for span in spans}):
        by_kind.setdefault(pool.partition("/")[0], []).append(shares(spans, pool, start_s, end_s))
    values: dict[str, float] = {}
    for kind, pools in by_kind.items():
        values[f"utilisation/{kind}"] = _mean([pool["busy"] for pool in pools])
        for state in STATES:
            if state != "busy":
                values[f"utilisation/{kind}/{state}"] = _mean([pool[state] for pool in pools])
    busy = [pool["busy"] for pools in by_kind.values() for pool in pools]
    if busy:
        values["utilisation/total"] = _mean(busy)
    return values


def sampled(samples: Iterable[Sample], start_s: float, end_s: float) -> dict[str, float]:
    """Metric values: `<name>/<kind>` is the mean of the samples in [start_s, end_s) over the pools of a kind."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        if start_s <= sample.time_s < end_s:
            values.setdefault(f"{sample.name}/{sample.pool.partition('/')[0]}", []).append(sample.value)
    return {key: _mean(of_key) for key, of_key in values.items()}


def write_chrome_trace(spans: Iterable[Span], path: str | Path, samples: Iterable[Sample] = ()) -> None:
    """Trace Event JSON for https://ui.perfetto.dev or chrome://tracing.

    Each pool is a process. Its spans are laid on as few threads (lanes) as keep any two spans of a thread
    from overlapping, because a trace viewer draws only nested slices. Its samples are counters. The clock starts
    at the first span.
    """
    ordered = sorted(spans, key=lambda span: (span.pool, span.start_s, span.end_s))
    origin_s = min((span.start_s for span in ordered), default=0.0)
    events: list[dict[str, Any]] = []
    lanes: dict[str, list[float]] = {}
    pids: dict[str, int] = {}
    for span in ordered:
        pid = pids.setdefault(span.pool, len(pids) + 1)
        ends_s = lanes.setdefault(span.pool, [])
        lane = next((i for i, lane_end_s in enumerate(ends_s) if lane_end_s <= span.start_s), len(ends_s))
        ends_s[lane : lane + 1] = [span.end_s]
        events.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": lane,
                "name": span.name or span.state,
                "cat": span.state,
                "ts": (span.start_s - origin_s) * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
            }
        )
    for sample in samples:
        if sample.pool in pids:
            counter = {"name": sample.name, "args": {sample.name: sample.value}}
            events.append({"ph": "C", "pid": pids[sample.pool], "ts": (sample.time_s - origin_s) * 1e6, **counter})
    for pool, pid in pids.items():
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": pool}})
        events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
        for lane in range(len(lanes[pool])):
            name = {"name": f"{pool} lane {lane}"}
            events.append({"ph": "M", "pid": pid, "tid": lane, "name": "thread_name", "args": name})
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def read_chrome_trace(path: str | Path) -> list[Span]:
    """The spans of `write_chrome_trace`; the clock starts at the first one."""
    events = json.loads(Path(path).read_text())["traceEvents"]
    pools = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return [
        Span(pools[e["pid"]], e["cat"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["name"])
        for e in events
        if e["ph"] == "X"
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
