"""Lanes cut from timeline.json, also while it is written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from async_rl.base.telemetry.timeline import JOINED, LEFT, ChromeTrace, Sample, Span
from async_rl.run.log.run_timeline import RunTimeline
from async_rl.tools.view.growing_files import Segment, TimelineFile, step_ends_s
from tests.kit.view.run_dirs import write_timeline


@pytest.mark.parametrize("is_closed, shown", [(False, 2), (True, 3)])
def test_a_step_is_shown_once_every_pool_is_known(tmp_path: Path, is_closed: bool, shown: int) -> None:
    trace = ChromeTrace(tmp_path / "timeline.json", 0.0)
    for start_s in range(3):
        trace.add([Span("learner/0", "busy", start_s, start_s + 0.9, "update")], [])
        trace.add([Span("learner/0", "wait_data", start_s + 0.9, start_s + 1, "batch")], [])
    # The file ends with a line that is not complete yet, and without what rollout/0 does since 2.5 s.
    trace.add([Span("rollout/0", "busy", 0, 2.5)], [Sample("rollout/0", "occupancy", 2.5, 0.5)])
    if is_closed:
        trace.close()
    window = TimelineFile(tmp_path / "timeline.json").refresh().window(1, 3, number_of_first=1)
    assert window is not None
    assert window.last_step == shown


def test_a_pool_that_ended_is_not_waited_for(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "timeline.json", 0.0)
    trace.add([Span("rollout/1", "busy", 0, 1.5)], [])
    for start_s in range(20):
        trace.add([Span("learner/0", "busy", start_s, start_s + 0.9, "update")], [])
        trace.add([Span("learner/0", "wait_data", start_s + 0.9, start_s + 1, "batch")], [])
        trace.add([Span("rollout/0", "busy", start_s, start_s + 1)], [])
    timeline = TimelineFile(tmp_path / "timeline.json").refresh()
    assert len(timeline.step_ends_s()) == 19  # the last line has no end yet


def test_a_wait_for_a_batch_is_split_by_what_rollout_did(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "timeline.json", 0.0)
    trace.add(
        [
            Span("learner/0", "busy", 0, 1, "update"), Span("learner/0", "wait_data", 1, 4, "batch"),
            Span("learner/0", "busy", 4, 5, "update"), Span("rollout/0", "sync", 0, 2), Span("rollout/0", "busy", 2, 5),
            Span("rollout/1", "wait_weights", 0, 3), Span("rollout/1", "busy", 3, 5),
        ],
        [],
    )  # fmt: skip
    trace.close()
    window = TimelineFile(tmp_path / "timeline.json").refresh().window(2, 2, number_of_first=1)
    assert window is not None
    assert window.waits_s == pytest.approx({"batch/sync": 0.5, "batch/wait_weights": 1.0, "batch/busy": 1.5})


def test_a_wait_for_a_batch_is_split_by_the_servers_that_are_there(tmp_path: Path) -> None:
    """rollout/1 joins at 3 s, rollout/0 leaves at 3.5 s and rollout/1 at 3.75 s; rollout/2 never joins again."""
    trace = ChromeTrace(tmp_path / "timeline.json", 0.0)
    trace.add(
        [
            Span("learner/0", "busy", 0, 1, "update"), Span("learner/0", "wait_data", 1, 4, "batch"),
            Span("learner/0", "busy", 4, 5, "update"), Span("rollout/0", "busy", 0, 5), Span("rollout/2", "eval", 0, 5),
            Span("rollout/1", "wait_weights", 0, 5),
        ],
        [],
    )  # fmt: skip
    for pool, name, time_s in (
        ("rollout/0", JOINED, 0.0), ("rollout/2", JOINED, 0.25), ("rollout/2", LEFT, 0.5), ("rollout/1", JOINED, 3.0),
        ("rollout/0", LEFT, 3.5), ("rollout/1", LEFT, 3.75),
    ):
        trace.mark(pool, name, time_s)
    trace.close()
    window = TimelineFile(tmp_path / "timeline.json").refresh().window(2, 2, number_of_first=1)
    assert window is not None
    assert window.waits_s == pytest.approx({
        "batch/busy": 2.0 + 0.5 / 2, "batch/wait_weights": 0.5 / 2 + 0.25, "batch/other": 0.25,
    })  # fmt: skip
    assert window.lanes["rollout/0"] == [Segment("busy", "", 0.0, 2.5)]
    assert window.lanes["rollout/1"] == [Segment("wait_weights", "", 2.0, 2.75)]
    assert window.lanes["rollout/2"] == []


def test_the_lanes_of_a_run_whose_servers_come_and_go_have_the_shares_of_its_summary(tmp_path: Path) -> None:
    def pause() -> float:
        time.sleep(0.02)
        return time.monotonic()

    timeline = RunTimeline(tmp_path)
    timeline.joined("rollout/0")
    start_s, middle_s = pause(), pause()
    timeline.end_step(middle_s)
    timeline.joined("rollout/1")
    wait_s = pause()
    timeline.left("rollout/0")
    end_s = pause()
    timeline.add_spans([
        Span("learner/0", "busy", start_s, middle_s, "update"),
        Span("learner/0", "wait_data", middle_s, wait_s, "batch"),
        Span("learner/0", "busy", wait_s, end_s, "update"), Span("rollout/0", "busy", start_s, wait_s),
        Span("rollout/1", "sync", wait_s, end_s),
    ])
    timeline.end_step(end_s)
    shares = timeline.usage_of_run().shares()
    timeline.close()
    window = TimelineFile(tmp_path / "timeline.json").refresh().window(2, 2, number_of_first=1)
    assert window is not None
    assert window.lanes.keys() == shares.keys() == {"learner/0", "rollout/0", "rollout/1"}
    for pool, segments in window.lanes.items():
        there_s = sum(each.end_s - each.start_s for each in segments)
        assert there_s < window.duration_s or pool == "learner/0"
        for state, share in shares[pool].items():
            seconds = sum(each.end_s - each.start_s for each in segments if each.state == state)
            assert seconds / there_s == pytest.approx(share, abs=1e-3), (pool, state)


def test_steps_of_a_resumed_run_keep_their_numbers(tmp_path: Path) -> None:
    write_timeline(tmp_path, steps=6)
    window = TimelineFile(tmp_path / "timeline.json").refresh().window(1, 43, number_of_first=41)
    assert window is not None
    assert (window.first_step, window.last_step) == (41, 43)


def test_a_file_that_grows_is_followed_from_where_it_was(tmp_path: Path) -> None:
    write_timeline(tmp_path, steps=4)
    whole = (tmp_path / "timeline.json").read_bytes()
    growing = tmp_path / "growing.json"
    growing.write_bytes(whole[: len(whole) // 2])  # in the middle of a line
    timeline = TimelineFile(growing).refresh()
    early = len(timeline.step_ends_s())
    with growing.open("ab") as file:
        file.write(whole[len(whole) // 2 :])
    assert early < 4
    assert len(timeline.refresh().step_ends_s()) == 4


def test_a_step_ends_where_the_wait_for_the_next_batch_begins() -> None:
    spans = [
        Span("l", "wait_data", 0, 1, "batch"), Span("l", "wait_data", 1, 2, "batch"), Span("l", "busy", 2, 3, "update"),
        Span("l", "sync", 3, 4, "push"), Span("l", "wait_data", 4.5, 5, "batch"), Span("l", "busy", 5, 6, "update"),
    ]  # fmt: skip
    assert step_ends_s(spans) == [4, 6]
