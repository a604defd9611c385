"""What every pool did when, as a file for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from async_rl.telemetry.timeline import Sample, Span

_SLICE = '{"ph": "X"'


class ChromeTrace:
    """Trace Event JSON, written as the run goes on, an event a line: a run of days takes no memory for it.

    Each pool is a process. Its spans are laid on threads (lanes) so that no two of a thread overlap, because a trace
    viewer draws only nested slices. Its samples are counters. Times are whole microseconds, so that spans which
    follow each other without a gap still do.

    Args:
        origin_s: the clock of the trace starts here; nothing happened before.
    """

    def __init__(self, path: Path, origin_s: float) -> None:
        self._path = path
        self._origin_s = origin_s
        self._file = path.open("w", encoding="utf-8")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        self._separator = "\n"
        self._pids: dict[str, int] = {}
        self._lanes: dict[str, list[int]] = {}
        """When the last span of each lane ends, in microseconds, by pool."""
        self._counters: dict[tuple[str, str], float] = {}
        """The last value by (pool, name)."""

    def add(self, spans: Iterable[Span], samples: Iterable[Sample]) -> None:
        """A sample with the value of the one before it is left out: a counter keeps its value."""
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

    def clock_s(self, time_s: float) -> float:
        """`time_s` by the clock of the trace."""
        return self._microseconds(time_s) / 1e6

    def spans(self) -> Iterator[Span]:
        """What was added so far, read back from the file; times are by the clock of the trace."""
        self._file.flush()
        pools = {pid: pool for pool, pid in self._pids.items()}
        with self._path.open(encoding="utf-8") as file:
            for line in file:
                if line.startswith(_SLICE):
                    e = json.loads(line.rstrip(",\n"))
                    yield Span(pools[e["pid"]], e["cat"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e["name"])

    def close(self) -> None:
        """Names the pools and their lanes; before that the file is not whole."""
        for index, pool in enumerate(sorted(self._pids), 1):
            self._write("M", pool, name="process_name", args={"name": pool})
            self._write("M", pool, name="process_sort_index", args={"sort_index": index})
            for lane in range(len(self._lanes.get(pool, ()))):
                self._write("M", pool, tid=lane, name="thread_name", args={"name": f"{pool} lane {lane}"})
        self._file.write("\n]}\n")
        self._file.close()

    def _write(self, phase: str, pool: str, **fields: Any) -> None:
        event = {"ph": phase, "pid": self._pids.setdefault(pool, len(self._pids) + 1), **fields}
        self._file.write(self._separator + json.dumps(event))
        self._separator = ",\n"

    def _microseconds(self, time_s: float) -> int:
        return round((time_s - self._origin_s) * 1e6)
