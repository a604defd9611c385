"""The clock of a run: the driver's monotonic clock, to which the times of other hosts are mapped."""

from __future__ import annotations

import time

import pytest

from async_rl.base.telemetry.timeline import HostClocks, Timeline, clock_id


def test_times_of_this_host_are_taken_as_they_are() -> None:
    assert HostClocks().behind_s(clock_id(), time.monotonic() - 30.0) == 0.0


def test_the_clock_of_another_host_is_known_from_its_quickest_report(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, now_s = HostClocks(), 5000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for delay_s, known_s in ((0.5, 4000.5), (0.01, 4000.01), (0.3, 4000.01)):
        now_s += 1.0
        assert clocks.behind_s("other", now_s - 4000.0 - delay_s) == pytest.approx(known_s)
    assert clocks.behind_s("third", now_s + 100.0) == pytest.approx(-100.0)


def test_a_span_is_as_long_as_it_took_although_the_wall_clock_is_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline("learner/0")
    with timeline.span("busy"):
        monkeypatch.setattr(time, "time", lambda: 0.0)
        began_s = time.monotonic()
    (span,) = timeline.drain()
    assert span.start_s <= began_s <= span.end_s
