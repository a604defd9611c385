"""Accounting of time: computes the share of time that each pool spent in each state from the spans of its work.

Pools are named `learner/<rank>`, `rollout/<index>` and `eval/<index>`. Every instant of a pool counts as exactly one
state, so the shares of a pool add up to 1. Times are in seconds of `time.monotonic()`, which is the same for all
processes of a host.

The definition of busy, for measurements and predictions:
    learner   the rank computes an update
    rollout   at least one group is in flight (granted, and not yet in the buffer), and no push delays it
    eval      a held-out evaluation is going on, and no push delays it
The occupancy of a busy rollout pool, its running requests over its slots, is a Sample and not a state.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, Self, get_args

State = Literal["busy", "wait_data", "wait_weights", "sync", "eval", "checkpoint", "other"]
STATES: tuple[State, ...] = get_args(State)

PRIORITY: tuple[State, ...] = ("sync", "eval", "checkpoint", "busy", "wait_weights", "wait_data", "other")
"""When spans of one pool overlap, an instant counts as the first of these states."""

RESTART = "restart"
"""The name of the span, in the state `other`, of a rollout server that is lost and started again."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of time [start_s, end_s) with `pool` in one state; `name` says its activity, if not empty."""

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
    """Collects the spans of one pool; safe to use from many threads and coroutines."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._spans: list[Span] = []
        self._open: list[tuple[State, str, float]] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, state: State, name: str = "") -> Iterator[None]:
        """Record the time of the `with` block as a span of this pool, also if the block raises."""
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
        """Return state, name and start of the innermost open `span`; `other`, now, if none is open."""
        with self._lock:
            return self._open[-1] if self._open else ("other", "", time.monotonic())

    def add(self, state: State, start_s: float, end_s: float, name: str = "") -> None:
        """Record a span. `end_s` is not before `start_s`."""
        span = Span(self._pool, state, start_s, end_s, name)
        with self._lock:
            self._spans.append(span)

    def drain(self) -> tuple[Span, ...]:
        """Return the spans recorded since the last call, and forget them."""
        with self._lock:
            spans, self._spans = tuple(self._spans), []
        return spans


class Usage:
    """The share of a window of time that each pool spent in each state, and the mean of each kind of sample in it.

    Time that no span covers is `other`, and PRIORITY decides where spans overlap. So the shares of a pool add up to 1.
    """

    def __init__(self) -> None:
        self._window_s = 0.0
        self._spent_s: dict[str, dict[State, float]] = {}
        """[pool][state] time spent in the state; the state `other` is left out."""
        self._samples: dict[str, tuple[float, int]] = {}
        """[metric key] sum and number of the samples."""

    def add(
        self, spans: Iterable[Span], samples: Iterable[Sample], start_s: float, end_s: float, pools: Iterable[str] = ()
    ) -> Self:
        """Add the time [start_s, end_s), with start_s < end_s, to the window; returns this object.

        `spans` are cut to that time, and `samples` outside of it are left out. A pool whose spans are all outside of
        that time was in the state `other`, and so were the `pools` without a span.
        """
        if not end_s > start_s:
            raise ValueError(f"a window must end after it starts, got start_s={start_s}, end_s={end_s}")
        self._window_s += end_s - start_s
        by_pool: dict[str, list[Span]] = {pool: [] for pool in pools}
        for span in spans:
            by_pool.setdefault(span.pool, []).append(span)
        for pool, of_pool in by_pool.items():
            spent_s = self._spent_s.setdefault(pool, {})
            for state, first_s, last_s in state_changes(of_pool, start_s, end_s):
                if state != "other":
                    spent_s[state] = spent_s.get(state, 0.0) + last_s - first_s
        for sample in samples:
            if start_s <= sample.time_s < end_s:
                key = f"{sample.name}/{_kind(sample.pool)}"
                total, number = self._samples.get(key, (0.0, 0))
                self._samples[key] = total + sample.value, number + 1
        return self

    def shares(self) -> dict[str, dict[State, float]]:
        """Return {pool: {state: share of the window}}, with every state, and the pools in the order of their names."""
        shares: dict[str, dict[State, float]] = {}
        for pool, spent_s in sorted(self._spent_s.items()):
            rest_s = max(0.0, self._window_s - sum(spent_s.values()))  # rounding may make it negative
            shares[pool] = {
                state: (rest_s if state == "other" else spent_s.get(state, 0.0)) / self._window_s for state in STATES
            }
        return shares

    def metrics(self) -> dict[str, float]:
        """Return the metrics of utilisation. The kind of a pool is the part of its name before `/`.

        `utilisation/<kind>` is the mean busy share over the kind's pools, `utilisation/<kind>/<state>` the mean
        share of every other state, `utilisation/total` the mean busy share over all pools. `<name>/<kind>` is the mean
        of all samples with that name in the pools of a kind.
        """
        shares = self.shares()
        values: dict[str, float] = {}
        for kind in dict.fromkeys(map(_kind, shares)):
            pools = [of_pool for pool, of_pool in shares.items() if _kind(pool) == kind]
            for state in STATES:
                key = f"utilisation/{kind}" if state == "busy" else f"utilisation/{kind}/{state}"
                values[key] = fmean(pool[state] for pool in pools)
        if shares:
            values["utilisation/total"] = fmean(of_pool["busy"] for of_pool in shares.values())
        return values | {key: total / number for key, (total, number) in self._samples.items()}


def state_changes(spans: Iterable[Span], start_s: float, end_s: float) -> Iterator[tuple[State, float, float]]:
    """Yield the states of one pool over [start_s, end_s) as (state, from, to), without gap or overlap.

    Where spans overlap, the first state in PRIORITY counts; time without a span is `other`.
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
