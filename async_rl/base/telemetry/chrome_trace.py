"""Writes the timeline of all pools as a trace file for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from async_rl.base.telemetry.timeline import Sample, Span

_SLICE = '{"ph": "X"'


class ChromeTrace:
    """A file of Trace Event JSON that is written during the run, one event per line, so that events need no memory.

    In the trace each pool is a process. Its spans are distributed over threads (lanes) so that spans of one thread do
    not overlap, because a trace viewer draws only nested slices. Its samples are counters.

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
        """[pool][lane] end of the lane's last span, in microseconds."""
        self._counters: dict[tuple[str, str], float] = {}
        """[pool, name] the last value of the counter."""

    def add(self, spans: Iterable[Span], samples: Iterable[Sample]) -> None:
        """Write spans and samples to the file, without samples that repeat a value: a counter keeps its value."""
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

    def clock_s(self, time_s: float) -> float:
        """Convert `time_s`, a value of time.monotonic(), to seconds on the clock of the trace."""
        return self._microseconds(time_s) / 1e6

    def spans(self) -> Iterator[Span]:
        """Read all spans written so far back from the file; their times are on the clock of the trace."""
        self._file.flush()
        pools = {pid: pool for pool, pid in self._pids.items()}
        with self._path.open(encoding="utf-8") as file:
            for line in file:
                if line.startswith(_SLICE):
                    e = json.loads(line.rstrip(",\n"))
                    yield Span(pools[e["pid"]], e["cat"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["name"])

    def close(self) -> None:
        """Write the order of the pools and the names of the lanes, which complete the file, and close it."""
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
