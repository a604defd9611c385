from __future__ import annotations

import dataclasses
import math

import pytest

from async_rl.depth.choice import (
    Forecast,
    Prospect,
    all_depths,
    best_move,
    best_of,
    compared,
    efficiency,
    forecast,
    in_reach,
    near,
)
from buffer.simulate import GroupTime, Workload

TOOLS = Workload(
    prompts_per_step=16, concurrency=80, train_s=10.0, sync_s=0.5, group_mean_s=4.0,
    groups=[GroupTime(4.0)] * 8 + [GroupTime(4.0, 40.0)] * 2,
)
"""A fifth of the groups waits 40 s for a tool, four times as long as a step takes."""
PROSPECT = Prospect(TOOLS, ceiling=8, depth=1.0, lowest=0.0, kl_per_version=0.0085, ess_loss_per_version=None)


def test_a_step_teaches_less_the_larger_its_kl() -> None:
    assert efficiency(0.0) == 1
    assert efficiency(0.0085) == pytest.approx(0.8182, abs=1e-4)  # 1 / (1 + 2.41 * 0.0922)
    assert efficiency(0.1) == pytest.approx(0.5675, abs=1e-4)


def test_depths_are_tried_in_quarters_then_halves_then_whole_ones_up_to_the_ceiling() -> None:
    assert all_depths(0.5, 2, 64) == [0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]
    assert all_depths(2.5, 8, 64) == [2.5, 2.75, 3, 3.5, 4, 4.5, 5, 6, 7, 8]


def test_depths_that_need_equally_many_slots_are_tried_once() -> None:
    assert all_depths(0, 3, 1) == [0, 1, 2, 3]
    assert all_depths(0, 2, 2) == [0, 0.5, 1, 1.5, 2]
    assert all_depths(0, 2, 3) == [0, 0.25, 0.5, 1, 1.25, 1.5, 2]  # of 3, 4, 5, 6, 7, 8, 9 slots


@pytest.mark.parametrize("depth", [1.0, 8.0, 32.0])
def test_a_forecast_has_the_staleness_that_a_long_run_at_its_depth_gets(depth: float) -> None:
    deep = dataclasses.replace(PROSPECT, workload=Workload(prompts_per_step=128, concurrency=4096), ceiling=32)
    assert forecast(deep, depth).staleness == pytest.approx(depth, rel=0.02)


def test_where_few_groups_are_long_a_depth_of_two_beats_both_sides() -> None:
    """As in the report: best constant depth 2 with tools of 40 s. Below it the learner waits, above data are older."""
    found = in_reach(PROSPECT)
    best = best_of(found)
    assert 1.5 <= best.depth <= 2.5
    assert best.worth > 1.1 * found[1.0].worth
    assert best.worth > 1.02 * forecast(PROSPECT, 8.0).worth


def test_where_groups_are_equal_and_quick_depth_one_is_enough() -> None:
    quick = dataclasses.replace(TOOLS, groups=[GroupTime(4.0)])
    assert best_of(in_reach(dataclasses.replace(PROSPECT, workload=quick))).depth <= 1


def test_without_a_cost_of_staleness_speed_alone_counts() -> None:
    free = dataclasses.replace(PROSPECT, kl_per_version=0.0)
    assert forecast(free, 2.0).efficiency == 1
    assert best_of(in_reach(free)).depth >= best_of(in_reach(PROSPECT)).depth


def test_a_move_down_has_to_pay_also_if_staleness_costs_half_as_much() -> None:
    """Efficiency 0.5 is a cost of one step a step, half of it makes 2 / 3: 10 steps are then worth 6.67, not 5."""
    here = Forecast(1.0, steps_per_min=10.0, staleness=1.0, efficiency=0.5)
    assert here.worth_at_half_cost == pytest.approx(20 / 3)
    paying, dear = Forecast(0.0, 6.7, 0.0, 1.0), Forecast(0.0, 6.6, 0.0, 1.0)
    assert best_move({0.0: paying, 1.0: here}, here) is paying
    assert dear.worth > 1.3 * here.worth and best_move({0.0: dear, 1.0: here}, here) is None


def test_a_move_up_pays_from_1_5_percent_on_and_goes_one_batch_at_most() -> None:
    here = Forecast(1.0, steps_per_min=10.0, staleness=1.0, efficiency=0.8)
    paying, little, far = Forecast(1.5, 10.2, 1.5, 0.8), Forecast(1.25, 10.1, 1.25, 0.8), Forecast(2.25, 20.0, 2.2, 0.8)
    assert best_move({1.0: here, 1.25: little, 1.5: paying, 2.25: far}, here) is paying
    assert best_move({1.0: here, 1.25: little, 2.25: far}, here) is None


def test_with_lr_by_ess_a_depth_counts_less() -> None:
    plain, less = forecast(PROSPECT, 4.0), forecast(dataclasses.replace(PROSPECT, ess_loss_per_version=0.02), 4.0)
    assert less.efficiency == pytest.approx(plain.efficiency * math.sqrt(1 - 0.02 * plain.staleness))
    assert less.steps_per_min == plain.steps_per_min


def test_near_depths_are_the_present_one_and_two_on_either_side() -> None:
    assert list(near(PROSPECT)) == [0.5, 0.75, 1, 1.25, 1.5]
    assert list(near(dataclasses.replace(PROSPECT, depth=8.0))) == [6, 7, 8]
    assert list(near(dataclasses.replace(PROSPECT, depth=3.25, lowest=3.0))) == [3, 3.25, 3.5, 4]


def test_no_depth_is_simulated_that_a_move_may_not_reach() -> None:
    free = dataclasses.replace(PROSPECT, kl_per_version=0.0, depth=0.5)
    assert max(in_reach(free)) <= 1.5
    assert max(in_reach(dataclasses.replace(free, depth=8.0))) == 8
    assert min(in_reach(dataclasses.replace(free, depth=8.0))) == 0  # down it may go all the way


def test_two_depths_are_compared_in_words() -> None:
    old, new = Forecast(1.25, 5.0, 1.25, 0.8), Forecast(1.5, 5.3, 1.5, 0.784)
    assert compared(new, old) == "6 % more steps than 1.25, and each teaches about 2 % less"
    assert compared(old, new) == "6 % fewer steps than 1.5, and each teaches about 2 % more"
