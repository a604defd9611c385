"""Shares of a pool's time are exact."""

from __future__ import annotations

import math
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.base.telemetry.metrics import over_steps, reduce_metrics
from async_rl.base.telemetry.timeline import PRIORITY, STATES, Sample, Span, State, Timeline, Usage, state_changes
from async_rl.run.log.run_timeline import RunTimeline

POOL = "learner/0"
times = st.floats(0, 100, allow_nan=False)
spans_of_a_pool = st.lists(st.builds(Span, st.just(POOL), st.sampled_from(STATES), times, times), max_size=30)


def shares(spans: list[Span], pool: str, start_s: float, end_s: float) -> dict[State, float]:
    empty = Span(pool, "other", start_s, start_s)  # a pool without spans is not listed
    return Usage().add([*spans, empty], (), start_s, end_s).shares()[pool]


@given(spans_of_a_pool, st.tuples(times, times).filter(lambda window: window[0] < window[1]))
def test_shares_add_up_to_one_and_none_is_negative(spans: list[Span], window: tuple[float, float]) -> None:
    result = shares(spans, POOL, *window)
    assert math.fsum(result.values()) == pytest.approx(1.0, abs=1e-9)
    assert all(share >= 0 for share in result.values())


@given(st.lists(st.tuples(st.sampled_from(STATES), st.integers(0, 20), st.integers(0, 20)), max_size=15))
def test_shares_equal_a_count_of_seconds(rows: list[tuple[str, int, int]]) -> None:
    spans = [Span(POOL, state, start, end) for state, start, end in rows]  # type: ignore[arg-type]
    counted = dict.fromkeys(STATES, 0)
    for second in range(20):
        running = [state for state, start, end in rows if start <= second < end]
        counted[min(running, key=PRIORITY.index) if running else "other"] += 1  # type: ignore[arg-type, index]
    assert shares(spans, POOL, 0, 20) == pytest.approx({state: n / 20 for state, n in counted.items()})


@given(spans_of_a_pool, st.lists(times, min_size=2, max_size=6, unique=True))
def test_a_window_in_parts_gives_the_same_shares_as_the_whole(spans: list[Span], edges: list[float]) -> None:
    edges.sort()
    samples = [Sample(POOL, "gpu", span.start_s, 0.5) for span in spans]
    parts, whole = Usage(), Usage().add(spans, samples, edges[0], edges[-1])
    for start_s, end_s in pairwise(edges):
        parts.add([s for s in spans if s.end_s > start_s and s.start_s < end_s], samples, start_s, end_s)
    for pool, of_parts in parts.shares().items():
        assert of_parts == pytest.approx(whole.shares()[pool], abs=1e-9)
    assert reduce_metrics(parts.metrics()).get("gpu/learner") == reduce_metrics(whole.metrics()).get("gpu/learner")


def test_utilisation_is_the_mean_over_pools_and_total_counts_each_pool_once() -> None:
    spans = [
        Span("learner/0", "busy", 0, 5),
        Span("rollout/0", "busy", 0, 10),
        Span("rollout/1", "busy", 0, 6),
        Span("rollout/1", "wait_weights", 6, 10),
        Span("rollout/2", "busy", -9, -8),  # idle in the window, but a pool all the same
    ]
    values = reduce_metrics(Usage().add(spans, (), 0, 10).metrics())
    assert values["utilisation/learner"] == pytest.approx(0.5)
    assert values["utilisation/rollout"] == pytest.approx(1.6 / 3)
    assert values["utilisation/rollout/wait_weights"] == pytest.approx(0.4 / 3)
    assert values["utilisation/total"] == pytest.approx(2.1 / 4)
    for kind in ("learner", "rollout"):
        of_kind = [
            v for k, v in values.items() if k == f"utilisation/{kind}" or k.startswith(f"utilisation/{kind}/")
        ]
        assert math.fsum(of_kind) == pytest.approx(1.0)


intervals = st.lists(times, min_size=2, max_size=6, unique=True).map(sorted).map(
    lambda edges: list(zip(edges[::2], edges[1::2], strict=False))
)


@given(spans_of_a_pool, st.lists(times, min_size=2, max_size=6, unique=True), intervals)
def test_a_pool_that_comes_and_goes_has_the_shares_of_the_time_in_which_it_was_there(
    spans: list[Span], edges: list[float], there: list[tuple[float, float]]
) -> None:
    edges.sort()
    in_parts, spent_s, there_s = Usage(), dict.fromkeys(STATES, 0.0), 0.0
    for start_s, end_s in pairwise(edges):  # as a run adds its steps, without a pool that has not been there yet
        known = [POOL] if any(first_s < end_s for first_s, _ in there) else []
        in_parts.add(spans if known else [], (), start_s, end_s, pools=known, there={POOL: there} if known else {})
    for first_s, last_s in there:
        if (start_s := max(first_s, edges[0])) < (end_s := min(last_s, edges[-1])):
            there_s += end_s - start_s
            for state, from_s, to_s in state_changes(spans, start_s, end_s):
                spent_s[state] += to_s - from_s
    if there_s < 1e-3:  # too short to tell
        return
    found = in_parts.shares()[POOL]
    assert found == pytest.approx({state: spent / there_s for state, spent in spent_s.items()}, abs=1e-6)
    assert math.fsum(found.values()) == pytest.approx(1.0, abs=1e-9)


def test_pools_count_by_the_time_in_which_they_were_there() -> None:
    usage = Usage().add([Span("rollout/0", "busy", 0, 10)], (), 0, 10, there={"rollout/0": [(0, math.inf)]})
    usage.add(
        [Span("rollout/0", "busy", 10, 16), Span("rollout/1", "busy", 15, 20)], (), 10, 20,
        there={"rollout/0": [(0, 16)], "rollout/1": [(14, math.inf)]},
    )
    values = reduce_metrics(usage.metrics())
    assert usage.shares()["rollout/1"]["busy"] == pytest.approx(5 / 6)
    assert values["utilisation/rollout"] == pytest.approx((16 + 5) / (16 + 6))
    assert values["utilisation/rollout/other"] == pytest.approx(1 / (16 + 6))


def test_over_steps_a_step_counts_by_the_seconds_of_all_its_servers() -> None:
    """One server busy for 10 of 10 s, then three for 4 of 10 s each: 22 of 40 seconds. The mean of both steps is .7."""
    records, declared, there = [], {}, {"rollout/0": [(0, math.inf)]}
    for start_s, names, busy_s in ((0, "0", 10), (10, "012", 4)):
        there |= {f"rollout/{name}": [(start_s, math.inf)] for name in names if name != "0"}
        spans = [Span("learner/0", "busy", start_s, start_s + 5)]
        spans += [Span(f"rollout/{name}", "busy", start_s, start_s + busy_s) for name in names]
        samples = [Sample(f"rollout/{name}", "occupancy", start_s + 1, busy_s / 10) for name in names]
        metrics = Usage().add(spans, samples, start_s, start_s + 10, there=there).metrics()
        records.append({**reduce_metrics(metrics), "time/step_s": 10.0})
        declared |= {metric.key: metric.declaration for metric in metrics}
    figures = over_steps(records, declared)
    expected = {
        "utilisation/rollout": 22 / 40, "utilisation/rollout/other": 18 / 40, "occupancy/rollout": 22 / 40,
        "utilisation/learner": 10 / 20, "utilisation/total": 32 / 60, "pools/rollout_s": 40.0,
    }
    assert {key: figures.get(key) for key in expected} == pytest.approx(expected)


def test_a_server_that_left_before_it_joined_was_never_there(tmp_path: Path) -> None:
    timeline, now_s = RunTimeline(tmp_path), time.monotonic()
    timeline.joined("rollout/0")
    timeline.left("rollout/1")
    timeline.end_step(now_s + 1)
    timeline.add_spans([Span(f"rollout/{number}", "sync", now_s + 1, now_s + 2) for number in (0, 1)])
    assert timeline.end_step(now_s + 2).shares().keys() == {"rollout/0"}
    timeline.close()


def test_a_span_is_recorded_also_when_its_body_raises_and_is_handed_out_once() -> None:
    timeline = Timeline(POOL)
    with pytest.raises(KeyError), timeline.span("busy", "step"):
        raise KeyError
    (span,) = timeline.drain()
    assert (span.pool, span.state, span.name) == (POOL, "busy", "step")
    assert span.end_s >= span.start_s
    assert timeline.drain() == ()


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


def test_samples_are_averaged_over_the_window_by_kind_of_pool() -> None:
    samples = [
        Sample("rollout/0", "occupancy", 1.0, 0.5),
        Sample("rollout/1", "occupancy", 2.0, 1.0),
        Sample("rollout/1", "occupancy", 10.0, 0.0),  # the window's end is outside
        Sample("learner/0", "gpu", 3.0, 0.9),
    ]
    found = reduce_metrics(Usage().add((), samples, 0, 10).metrics())
    assert found == {"occupancy/rollout": 0.75, "gpu/learner": 0.9}
