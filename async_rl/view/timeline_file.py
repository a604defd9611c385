"""Follows a run's timeline.json while it is written, and cuts a window of steps from it: each pool's states in time."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from async_rl.telemetry.timeline import RESTART, Span, state_changes

MAX_SPANS = 2_000_000
"""Spans beyond this number are not read; a run of a hundred thousand steps has fewer."""
MAX_SEGMENTS = 3000
"""The most segments in one lane. Shorter ones are merged into the longest of their neighbours."""
MAX_STEPS_BEHIND = 5
"""In a run that goes on, a pool is written when its state changes, some time after the learner. A pool that is further
behind than so many steps has ended, and is not waited for."""
UPDATE, BATCH = "update", "batch"
"""Names of the learner's spans that mark a step: it ends where the wait for the next batch begins."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of one lane in which the pool's state does not change."""

    state: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Window:
    """The lane of each pool, its states in order, over some steps. Times are in seconds from the window's start."""

    first_step: int
    last_step: int
    duration_s: float
    step_ends_s: list[float]
    lanes: dict[str, list[Segment]]
    shares: dict[str, dict[str, float]]
    """[pool][state] share of the window."""
    waits_s: dict[str, float]
    """The seconds that learner/0 did not compute, by the name of what it did or waited for. The wait for a batch is
    split by what the rollout pools did meanwhile: `batch/busy`, `batch/sync` and so on."""


class TimelineFile:
    """The spans in a timeline.json so far. A resume replaces the file, which is then read again. Safe for threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._inode = -1
        self._forget()

    def _forget(self) -> None:
        self._offset = 0
        self._number = 0
        self._spans: dict[int, list[Span]] = {}
        """[pid] spans ordered by their start."""
        self._pools: dict[int, str] = {}
        self._is_complete = False
        """Whether the run has ended and closed the file."""

    def refresh(self) -> TimelineFile:
        """Read the events that were added since the last call; returns this object."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    self._read(file)
            except OSError:
                return self  # not written yet, or just being replaced
            for spans in self._spans.values():
                spans.sort(key=lambda span: span.start_s)
        return self

    def _read(self, file: IO[bytes]) -> None:
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._inode = found.st_ino
            self._forget()
        file.seek(self._offset)
        for line in file:
            if not line.endswith(b"\n") or self._number >= MAX_SPANS:
                return  # half written, or enough
            self._offset += len(line)
            self._is_complete = line == b"]}\n"
            if line.startswith(b'{"ph": "X"') or line.startswith(b'{"ph": "M"'):
                try:
                    self._add(json.loads(line.rstrip(b",\n")))
                except (ValueError, KeyError, TypeError):
                    continue  # damaged: one event is missing in its lane

    def _add(self, event: dict[str, Any]) -> None:
        pid = int(event["pid"])
        if event["ph"] == "M":
            if event["name"] == "process_name":
                self._pools[pid] = str(event["args"]["name"])
            return
        start_s, end_s = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        name = "" if event["name"] == event["cat"] else str(event["name"])
        self._spans.setdefault(pid, []).append(Span(str(pid), event["cat"], start_s, end_s, name))
        self._number += 1

    def step_ends_s(self) -> list[float]:
        """Return when each step that can be shown ended, in seconds on the clock of the file."""
        with self._lock:
            return self._shown_ends_s()

    def _learner(self) -> list[Span]:
        """Return the spans of learner/0, or of the first pool with an update while the file does not name its pools."""
        named = [pid for pid, pool in self._pools.items() if pool == "learner/0"]
        with_update = [pid for pid, spans in self._spans.items() if any(span.name == UPDATE for span in spans[:50])]
        return self._spans.get((named or with_update or [-1])[0], [])

    def _shown_ends_s(self) -> list[float]:
        """Return the ends, in seconds, of the steps for which the file has the states of all pools that still run."""
        ends_s = step_ends_s(self._learner())
        if self._is_complete or not ends_s:
            return ends_s
        known_s = [max(span.end_s for span in spans[-16:]) for spans in self._spans.values()]
        oldest_s = ends_s[-min(len(ends_s), MAX_STEPS_BEHIND + 1)]
        until_s = min((end_s for end_s in known_s if end_s >= oldest_s), default=0.0)
        return ends_s[: bisect_right(ends_s, until_s)]

    def window(self, first: int, last: int, number_of_first: int) -> Window | None:
        """Return the lanes over those of the steps `first` to `last` whose end is in the file; None if there are none.

        Args:
            number_of_first: the number of the first step in the file, which is 1 unless the run was resumed.
        """
        with self._lock:
            ends_s = self._shown_ends_s()
            first_index = max(0, first - number_of_first)
            last_index = min(last - number_of_first, len(ends_s) - 1)
            if last_index < first_index:
                return None
            start_s = ends_s[first_index - 1] if first_index else self._start_of_first_step()
            end_s = ends_s[last_index]
            spans = {pid: self._between(pid, start_s, end_s) for pid in sorted(self._spans)}
            learner = self._learner()
            pools = {pid: self._pools.get(pid, _guess(of_pid, learner, pid)) for pid, of_pid in self._spans.items()}
        shown_ends_s = [end - start_s for end in ends_s[first_index : last_index + 1]]
        lanes, shares, rollout = {}, {}, []
        for pid in sorted(spans, key=lambda pid: pools[pid]):
            segments = _segments(spans[pid], start_s, end_s)
            shares[pools[pid]] = _shares(segments, end_s - start_s)
            lanes[pools[pid]] = _merged(segments, (end_s - start_s) / MAX_SEGMENTS)
            if pools[pid].startswith("rollout"):
                rollout.append(segments)
        waiting = [span for span in learner if span.start_s < end_s and span.end_s > start_s]
        waits_s = _waits_s(waiting, start_s, end_s) | _batch_waits_s(waiting, rollout, start_s, end_s)
        return Window(
            first_index + number_of_first,
            last_index + number_of_first,
            end_s - start_s,
            shown_ends_s,
            lanes,
            shares,
            waits_s,
        )

    def _start_of_first_step(self) -> float:
        """Return the start of the first update: before it the pools start up, which takes much longer than a step."""
        return next((span.start_s for span in self._learner() if span.name == UPDATE), 0.0)

    def _between(self, pid: int, start_s: float, end_s: float) -> list[Span]:
        spans = self._spans[pid]
        before = bisect_left(spans, end_s, key=lambda span: span.start_s)
        return [span for span in spans[:before] if span.end_s > start_s]


def step_ends_s(learner: Sequence[Span]) -> list[float]:
    """Return when each step ended, in seconds: with the learner's last span before it waits for the next batch."""
    ends_s: list[float] = []
    has_trained, end_s = False, 0.0
    for span in learner:
        if span.name == BATCH and has_trained:
            ends_s.append(end_s)
            has_trained = False
        has_trained = has_trained or span.name == UPDATE
        end_s = max(end_s, span.end_s)
    return [*ends_s, end_s] if has_trained else ends_s


def _guess(spans: Sequence[Span], learner: Sequence[Span], pid: int) -> str:
    """Return a name for a pool that the file does not name yet; older versions of this program name it at the end."""
    if spans is learner:
        return "learner/0"
    return f"learner (process {pid})" if any(span.name == UPDATE for span in spans[:50]) else f"rollout ({pid})"


def _segments(spans: Sequence[Span], start_s: float, end_s: float) -> list[Segment]:
    """Return the states of one pool over the window, without gap or overlap, timed from the start of the window."""
    starts_s = [span.start_s for span in spans]
    segments: list[Segment] = []
    for state, from_s, to_s in state_changes(spans, start_s, end_s):
        middle_s = (from_s + to_s) / 2
        near = spans[max(0, bisect_right(starts_s, middle_s) - 16) : bisect_right(starts_s, middle_s)]
        name = next((s.name for s in reversed(near) if s.state == state and s.end_s > middle_s), "")
        last = segments[-1] if segments else None
        if last and (last.state, last.name) == (state, name):
            segments[-1] = Segment(state, name, last.start_s, to_s - start_s)
        else:
            segments.append(Segment(state, name, from_s - start_s, to_s - start_s))
    return segments


def _merged(segments: list[Segment], shortest_s: float) -> list[Segment]:
    """Return at most about MAX_SEGMENTS segments: short neighbours become one, which has the state of the longest."""
    if len(segments) <= MAX_SEGMENTS:
        return segments
    merged: list[Segment] = []
    part: list[Segment] = []
    for segment in segments:
        part.append(segment)
        if segment.end_s - part[0].start_s >= shortest_s or segment is segments[-1]:
            longest = max(part, key=lambda s: s.end_s - s.start_s)
            merged.append(Segment(longest.state, longest.name, part[0].start_s, segment.end_s))
            part = []
    return merged


def _shares(segments: Sequence[Segment], duration_s: float) -> dict[str, float]:
    shares: dict[str, float] = {}
    for segment in segments:
        share = (segment.end_s - segment.start_s) / duration_s if duration_s else 0.0
        shares[segment.state] = shares.get(segment.state, 0.0) + share
    return shares


def _waits_s(learner: Sequence[Span], start_s: float, end_s: float) -> dict[str, float]:
    waits_s: dict[str, float] = {}
    for span in learner:
        if span.name not in (UPDATE, BATCH):
            seconds = min(span.end_s, end_s) - max(span.start_s, start_s)
            waits_s[span.name or span.state] = waits_s.get(span.name or span.state, 0.0) + seconds
    named_s = sum(min(s.end_s, end_s) - max(s.start_s, start_s) for s in learner if s.name in (UPDATE, BATCH))
    rest_s = (end_s - start_s) - named_s - sum(waits_s.values())
    return waits_s | ({"other": rest_s} if rest_s > 1e-6 else {})


def _batch_waits_s(
    learner: Sequence[Span], rollout: Sequence[Sequence[Segment]], start_s: float, end_s: float
) -> dict[str, float]:
    """Return the seconds of the learner's waits for a batch by `batch/STATE`, the mean over the pools of `rollout`.

    The restart of a rollout server, which is in the state `other`, is `batch/restart`.

    The segments of each pool cover the window from `start_s` to `end_s` without a gap, timed from its start.
    """
    waits_s: dict[str, float] = {}
    for span in learner:
        if span.name != BATCH:
            continue
        first_s, last_s = max(span.start_s, start_s) - start_s, min(span.end_s, end_s) - start_s
        for segments in rollout or [[Segment("other", "", 0.0, end_s - start_s)]]:
            begin = bisect_right(segments, first_s, key=lambda segment: segment.end_s)
            end = bisect_left(segments, last_s, key=lambda segment: segment.start_s)
            for segment in segments[begin:end]:
                seconds = min(segment.end_s, last_s) - max(segment.start_s, first_s)
                key = f"{BATCH}/{RESTART if segment.name == RESTART else segment.state}"
                waits_s[key] = waits_s.get(key, 0.0) + seconds / max(1, len(rollout))
    return waits_s
