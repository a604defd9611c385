from __future__ import annotations

import dataclasses

import pytest

from async_rl.config import StalenessConfig
from buffer.simulate import GroupTime, Simulation, Workload, simulate

EQUAL = Workload(prompts_per_step=4, concurrency=100, train_s=10.0, sync_s=0.0, group_mean_s=8.0, group_cv=0.0)


def test_measured_groups_take_the_place_of_drawn_durations() -> None:
    measured = dataclasses.replace(EQUAL, groups=[GroupTime(8.0)])
    assert simulate(measured, 2, 30) == simulate(EQUAL, 2, 30)


def test_a_wait_for_a_tool_is_neither_slowed_down_nor_paused() -> None:
    """Synchronously a step is 4 groups' sampling at a full engine, 4 * 2 s, or a push of 3 s, and 30 s of waiting."""
    full = dataclasses.replace(EQUAL, group_mean_s=2.0, load_s=2.0, groups=[GroupTime(2.0, 30.0)])
    assert simulate(full, 0, 20).step_s == pytest.approx(10 + 4 * 2 + 30)
    pushed = dataclasses.replace(full, sync_s=3.0)
    assert simulate(pushed, 0, 20).step_s == pytest.approx(10 + 3 + 4 * 2 + 30)
    ahead = dataclasses.replace(pushed, train_s=100.0)
    assert simulate(ahead, 1, 20).step_s == pytest.approx(103)  # 38 s of the next batch pass meanwhile


def test_a_push_pauses_sampling_and_not_waiting() -> None:
    slow = dataclasses.replace(EQUAL, train_s=1.0, sync_s=20.0)
    sampling = dataclasses.replace(slow, groups=[GroupTime(30.0)], group_mean_s=30.0)
    waiting = dataclasses.replace(slow, groups=[GroupTime(0.0, 30.0)], group_mean_s=30.0)
    assert simulate(sampling, 1, 30).step_s > simulate(waiting, 1, 30).step_s + 5


def test_groups_take_equally_long_at_every_depth() -> None:
    class Recorded(Simulation):
        def group_time(self) -> GroupTime:
            drawn.append(super().group_time())
            return drawn[-1]

    found = []
    for depth in (1, 4):
        drawn: list[GroupTime] = []
        Recorded(Workload(prompts_per_step=8, failed=0.1, train_cv=0.1), StalenessConfig(max=8, depth=depth), 3).run(20)
        found.append(drawn)
    assert found[0][:150] == found[1][:150] and len(set(found[0][:150])) == 150


def test_the_first_steps_can_be_left_out() -> None:
    result = simulate(EQUAL, 3, 30, begin=10)
    assert result.mean_staleness == 3
    assert result.utilisation == pytest.approx(1)
    assert simulate(EQUAL, 3, 30).mean_staleness == pytest.approx((1 + 2 + 27 * 3) / 29)
