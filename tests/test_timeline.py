"""Shares of a pool's time are exact; traces open in a viewer."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.timeline import (
    PRIORITY,
    STATES,
    Sample,
    Span,
    Timeline,
    read_chrome_trace,
    sampled,
    shares,
    state_changes,
    utilisation,
    write_chrome_trace,
)

POOL = "learner/0"
times = st.floats(0, 100, allow_nan=False)
spans_of_a_pool = st.lists(st.builds(Span, st.just(POOL), st.sampled_from(STATES), times, times), max_size=30)


def test_every_state_has_a_priority() -> None:
    assert sorted(PRIORITY) == sorted(STATES)


def test_shares_of_a_hand_made_day() -> None:
    spans = [
        Span(POOL, "wait_data", 0, 4),
        Span(POOL, "busy", 4, 8),
        Span(POOL, "sync", 7, 9),  # one second of the busy span was really a pause
        Span("learner/1", "busy", 0, 10),
    ]
    expected = dict.fromkeys(STATES, 0.0) | {"wait_data": 0.4, "busy": 0.3, "sync": 0.2, "other": 0.1}
    assert shares(spans, POOL, 0, 10) == expected


def test_spans_that_reach_over_the_window_count_only_inside_it() -> None:
    spans = [Span(POOL, "busy", -5, 1), Span(POOL, "eval", 3, 50)]
    result = shares(spans, POOL, 0, 4)
    assert (result["busy"], result["other"], result["eval"]) == (0.25, 0.5, 0.25)


def test_an_empty_window_is_refused() -> None:
    with pytest.raises(ValueError, match="end after it starts"):
        shares([], POOL, 3, 3)


@given(spans_of_a_pool, st.tuples(times, times).filter(lambda window: window[0] < window[1]))
def test_shares_add_up_to_one_and_none_is_negative(spans: list[Span], window: tuple[float, float]) -> None:
    result = shares(spans, POOL, *window)
    assert math.fsum(result.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(share >= 0 for share in result.values())


@given(st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 20), st.integers(0, 20)), max_size=15))
def test_shares_equal_a_count_of_seconds(rows: list[tuple[str, int, int]]) -> None:
    spans = [Span(POOL, state, start, end) for state, start, end in rows]  # type: ignore[arg-type]
    counted = dict.fromkeys(STATES, 0)
    for second in range(20):
        running = [state for state, start, end in rows if start <= second < end]
        counted[min(running, key=PRIORITY.index) if running else "other"] += 1  # type: ignore[arg-type, index]
    assert shares(spans, POOL, 0, 20) == pytest.approx({state: n / 20 for state, n in counted.items()})


def test_utilisation_is_the_mean_over_pools_and_total_counts_each_pool_once() -> None:
    spans = [
        Span("learner/0", "busy", 0, 5),
        Span("rollout/0", "busy", 0, 10),
        Span("rollout/1", "busy", 0, 6),
        Span("rollout/1", "wait_weights", 6, 10),
        Span("rollout/2", "busy", -9, -8),  # idle in the window, but a pool all the same
    ]
    values = utilisation(spans, 0, 10)
    assert values["utilisation/learner"] == pytest.approx(0.5)
    assert values["utilisation/rollout"] == pytest.approx(1.6 / 3)
    assert values["utilisation/rollout/wait_weights"] == pytest.approx(0.4 / 3)
    assert values["utilisation/total"] == pytest.approx(2.1 / 4)
    for kind in ("learner", "rollout"):
        of_kind = [
            v for k, v in values.items() if k == f"utilisation/{kind}" or k.startswith(f"utilisation/{kind}/")
        ]
        assert math.fsum(of_kind) == pytest.approx(1.0)


def test_a_span_is_recorded_also_when_its_body_raises_and_is_handed_out_once() -> None:
    timeline = Timeline(POOL)
    with pytest.raises(KeyError), timeline.span("busy", "step"):
        raise KeyError
    (span,) = timeline.drain()
    assert (span.pool, span.state, span.name) == (POOL, "busy", "step")
    assert span.end_s >= span.start_s
    assert timeline.drain() == ()


def test_a_clock_set_back_makes_an_empty_span() -> None:
    timeline = Timeline(POOL)
    timeline.add("busy", 10.0, 9.0)
    assert timeline.drain() == (Span(POOL, "busy", 10.0, 10.0),)


def test_no_span_is_lost_between_threads() -> None:
    timeline = Timeline(POOL)
    drained: list[Span] = []

    def work() -> None:
        for i in range(500):
            timeline.add("busy", i, i + 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        drained += timeline.drain()
    drained += timeline.drain()
    assert len(drained) == 2000


def test_a_trace_names_its_pools_and_draws_no_overlap_on_one_thread(tmp_path: Path) -> None:
    spans = [
        Span("rollout/0", "busy", 100.0, 102.0, "group 1"),
        Span("rollout/0", "busy", 101.0, 103.0, "group 2"),
        Span("rollout/0", "wait_weights", 102.0, 104.0),
        Span("learner/0", "sync", 100.5, 101.0),
    ]
    write_chrome_trace(spans, tmp_path / "timeline.json")
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


def test_samples_are_averaged_over_the_window_by_kind_of_pool() -> None:
    samples = [
        Sample("rollout/0", "occupancy", 1.0, 0.5),
        Sample("rollout/1", "occupancy", 2.0, 1.0),
        Sample("rollout/1", "occupancy", 10.0, 0.0),  # the window's end is outside
        Sample("learner/0", "gpu", 3.0, 0.9),
    ]
    assert sampled(samples, 0, 10) == {"occupancy/rollout": 0.75, "gpu/learner": 0.9}


def test_a_trace_read_back_has_the_spans_and_the_samples_are_counters(tmp_path: Path) -> None:
    spans = [Span("learner/0", "busy", 50.0, 51.0, "update"), Span("rollout/0", "wait_weights", 50.5, 52.0)]
    write_chrome_trace(spans, tmp_path / "t.json", [Sample("rollout/0", "occupancy", 51.0, 0.25)])
    read = read_chrome_trace(tmp_path / "t.json")
    assert read == [
        Span("learner/0", "busy", 0.0, 1.0, "update"), Span("rollout/0", "wait_weights", 0.5, 2.0, "wait_weights")
    ]  # fmt: skip
    (counter,) = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "C"]
    assert (counter["pid"], counter["ts"], counter["args"]) == (2, 1e6, {"occupancy": 0.25})


def test_a_pool_s_states_follow_each_other_without_gap_or_overlap() -> None:
    spans = [Span(POOL, "busy", 0, 3), Span(POOL, "sync", 2, 5), Span(POOL, "busy", 6, 9)]
    assert list(state_changes(spans, POOL, 1, 8)) == [
        ("busy", 1, 2), ("sync", 2, 3), ("sync", 3, 5), ("other", 5, 6), ("busy", 6, 8)
    ]  # fmt: skip
