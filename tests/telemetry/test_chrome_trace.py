"""The trace file has the structure that trace viewers read."""

from __future__ import annotations

import json
from pathlib import Path

from async_rl.base.telemetry.timeline import ChromeTrace, Sample, Span


def test_a_trace_names_its_pools_and_draws_no_overlap_on_one_thread(tmp_path: Path) -> None:
    spans = [
        Span("rollout/0", "busy", 100.0, 102.0, "group 1"),
        Span("rollout/0", "busy", 101.0, 103.0, "group 2"),
        Span("rollout/0", "wait_weights", 102.0, 104.0),
        Span("learner/0", "sync", 100.5, 101.0),
    ]
    trace = ChromeTrace(tmp_path / "timeline.json", 100.0)
    trace.add(spans, ())
    trace.close()
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert sorted(processes.values()) == ["learner/0", "rollout/0"]
    slices = [e for e in events if e["ph"] == "X"]
    assert {(e["name"], e["ts"], e["dur"]) for e in slices} == {
        ("group 1", 0, 2e6), ("group 2", 1e6, 2e6), ("wait_weights", 2e6, 2e6), ("sync", 0.5e6, 0.5e6)
    }  # fmt: skip
    lanes: dict[tuple[int, int], float] = {}
    for event in slices:
        lane = (event["pid"], event["tid"])
        assert event["ts"] >= lanes.get(lane, 0)
        lanes[lane] = event["ts"] + event["dur"]
    assert len(lanes) == 3
    assert {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"} == set(lanes)


def test_a_trace_read_back_has_the_spans_and_the_samples_are_counters(tmp_path: Path) -> None:
    spans = [Span("learner/0", "busy", 50.0, 51.0, "update"), Span("rollout/0", "wait_weights", 50.5, 52.0)]
    trace = ChromeTrace(tmp_path / "t.json", 50.0)
    occupancy = [Sample("rollout/0", "occupancy", 51.0 + i, value) for i, value in enumerate((0.25, 0.25, 0.5))]
    trace.add(spans[:1], [])
    trace.add(spans[1:], occupancy)
    assert list(trace.spans()) == [
        Span("learner/0", "busy", 0.0, 1.0, "update"), Span("rollout/0", "wait_weights", 0.5, 2.0, "wait_weights")
    ]  # fmt: skip
    trace.close()
    counters = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "C"]
    assert [(counter["pid"], counter["ts"], counter["args"]) for counter in counters] == [
        (2, 1e6, {"occupancy": 0.25}), (2, 3e6, {"occupancy": 0.5})  # between them it does not change
    ]  # fmt: skip
