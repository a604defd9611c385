from __future__ import annotations

from typing import Any

import pytest

from async_rl.base.telemetry.metrics import reduce_metrics
from async_rl.base.telemetry.timeline import Usage
from rollout_server.worker.worker_stats import WorkerStats


class Clock:
    now_s = 100.0

    def time(self) -> float:
        return self.now_s

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rollout_server.worker.worker_stats.time", clock)
    return clock


def at(clock: Clock, now_s: float, call: Any, *arguments: Any) -> Any:
    clock.now_s = now_s
    return call(*arguments)


def test_an_evaluation_counts_where_no_group_is_in_flight(clock: Clock) -> None:
    stats = WorkerStats("rollout/0")
    evaluation = stats.evaluating()
    at(clock, 101, evaluation.__enter__)  # alone for 3 s, and for 1 s more after the group
    at(clock, 104, stats.begin_group, 1)
    at(clock, 107, stats.end_group, 1)
    at(clock, 108, evaluation.__exit__, None, None, None)
    result = Usage().add(at(clock, 110, stats.drain_spans), (), 100, 110).shares()["rollout/0"]
    assert (result["eval"], result["busy"], result["wait_weights"]) == (0.4, 0.3, 0.3)


def test_the_stats_tell_how_long_groups_took_and_how_many_were_in_flight(clock: Clock) -> None:
    stats = WorkerStats("rollout/0")
    at(clock, 100, stats.begin_group, 1)  # alone for 2 s, then two for 2 s: 1.5 on average
    at(clock, 102, stats.begin_group, 2)  # two for 2 s, then alone for 1 s: 5/3 on average
    at(clock, 104, stats.end_group, 1)
    at(clock, 105, stats.end_group, 2)
    values = reduce_metrics(stats.drain_groups())
    assert values["rollout/group_s"] == pytest.approx((4 + 3) / 2)
    assert values["rollout/group_s_squared"] == pytest.approx((16 + 9) / 2)
    assert values["rollout/concurrency"] == pytest.approx((1.5 + 5 / 3) / 2)
    assert stats.drain_groups() == []
