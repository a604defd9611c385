from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from benchmarks.plan import describe_memory, describe_overlap, describe_plan, make_plan, split_devices
from benchmarks.prediction import Stages, batch_seconds, closed_form, simulated, work_conserving_bound, workload_of
from benchmarks.simulate import Workload, simulate

STEADY = Workload(
    concurrency=64, prompts_per_step=64, train_s=40.0, sync_s=0.0, group_mean_s=60.0, group_cv=0.0
)  # fmt: skip
"""60 s of generation, 40 s of learning."""


def test_closed_form_of_a_60_40_split() -> None:
    """In turn the learner works 40 s of 100; overlapped, generation is the bottleneck: 40 s of 60."""
    at_0, at_1 = closed_form(STEADY, 0), closed_form(STEADY, 1)
    assert (at_0.step_s, at_0.learner, at_0.rollout) == pytest.approx((100, 0.4, 0.6))
    assert (at_1.step_s, at_1.learner, at_1.rollout) == pytest.approx((60, 2 / 3, 1.0))
    assert (at_0.staleness, at_1.staleness) == (0.0, 1.0)


def test_closed_form_and_simulation_agree_where_nothing_is_random() -> None:
    for bound in (0, 1, 2):
        closed, found = closed_form(STEADY, bound), simulated(STEADY, bound)
        assert found.step_s == pytest.approx(closed.step_s, rel=0.02)
        assert found.rollout == pytest.approx(closed.rollout, rel=0.02)
        assert found.occupancy == pytest.approx(closed.occupancy, rel=0.02)


def test_staleness_of_a_small_engine_stays_below_the_bound() -> None:
    """algorithms.md D2's generation-bound twin: mean staleness sticks at 0.7 whatever the bound."""
    twin = Workload(
        concurrency=16, prompts_per_step=32, train_s=1.5, sync_s=0.15, group_mean_s=3.65, group_cv=0.2
    )  # fmt: skip
    assert closed_form(twin, 8).staleness == pytest.approx(0.73, abs=0.01)
    assert simulated(twin, 8).staleness == pytest.approx(0.7, abs=0.1)


def test_a_full_engine_gives_the_same_throughput_at_every_load() -> None:
    """load_s = group_mean_s: 32 groups alone take 32 * 0.1 s, 64 at once twice as long."""
    full = Workload(
        concurrency=64, prompts_per_step=32, train_s=1.0, sync_s=0.0, group_mean_s=0.1, load_s=0.1, group_cv=0.0
    )  # fmt: skip
    assert batch_seconds(full) == pytest.approx(3.2)
    assert simulate(full, 0, 20).step_s == pytest.approx(4.2)
    assert simulate(full, 1, 400).step_s == pytest.approx(3.2, rel=0.02)
    assert closed_form(full, 1).step_s == pytest.approx(3.2)


def test_the_simulated_rollout_pool_is_busy_while_a_group_is_in_flight() -> None:
    result = simulate(dataclasses.replace(STEADY, sync_s=5.0), 0, 50)
    assert result.step_s == pytest.approx(105)
    assert result.rollout == pytest.approx(60 / 105)
    assert result.occupancy == pytest.approx(60 / 105)  # all 64 until the end of the batch


def test_dropped_groups_are_generated_all_the_same() -> None:
    full = Workload(
        concurrency=64, prompts_per_step=32, train_s=0.0, sync_s=0.0, group_mean_s=0.1, load_s=0.1, group_cv=0.0,
        failed=0.5,
    )  # fmt: skip
    assert simulate(full, 1, 400).step_s == pytest.approx(6.4, rel=0.05)
    assert closed_form(full, 1).step_s == pytest.approx(6.4)


def stage(in_flight: float, group_s: float) -> Stages:
    return Stages(
        train_s=2.0, train_cv=0.1, sync_s=0.5, pause_s=0.4, handout_s=0.1, group_s=group_s, group_cv=0.2,
        in_flight=in_flight, rollout_busy_s=3.0, eval_s=0.0, failed=0.0,
    )


def test_the_slope_of_durations_over_the_load_is_found() -> None:
    workload = workload_of([stage(11, 2.0), stage(21, 3.0), stage(31, 4.0)], 16, 64)
    assert (workload.load_s, workload.group_mean_s) == pytest.approx((0.1, 1.0))
    assert workload.group_s(31) == pytest.approx(4.0)


def test_without_different_loads_the_engine_counts_as_full() -> None:
    workload = workload_of([stage(20, 2.0)], 16, 64)
    assert workload.load_s == pytest.approx(0.1)
    assert workload.group_s(20) == pytest.approx(2.0)


def test_the_work_conserving_bound_is_in_turn_at_0_and_the_slower_pool_above() -> None:
    found = stage(20, 2.0)  # learner 2 s + 0.5 s push, rollout busy 3 s and paused 0.4 s
    assert work_conserving_bound(found, 0) == pytest.approx(5 / 5.5)
    assert work_conserving_bound(found, 4) == pytest.approx(5 / 3.4)


def test_the_recommended_bound_is_the_smallest_that_is_fast() -> None:
    """Heavy tails: every bound up to 8 helps."""
    plan = make_plan(dataclasses.replace(Workload(), concurrency=16, prompts_per_step=16), (0, 2, 8))
    assert plan.best == 8
    light = make_plan(dataclasses.replace(Workload(), group_cv=0.0), (0, 1, 2, 4))
    assert light.best == 1
    assert "Take staleness.max = 1" in describe_plan(light)


def test_devices_are_split_so_that_neither_pool_waits_for_the_other() -> None:
    """Measured on 4 + 4: generation 60 s, learning 20 s. On 8 devices 6 + 2 gives 40 s each."""
    workload = Workload(
        concurrency=64, prompts_per_step=64, train_s=20.0, sync_s=0.0, group_mean_s=60 / 64, load_s=60 / 64,
        group_cv=0.0,
    )  # fmt: skip
    best = split_devices(workload, 8, 4, learner_now=4, rollout_now=4)[0]
    assert (best.learner_devices, best.rollout_devices) == (2, 6)
    assert best.forecast.step_s == pytest.approx(40.0, rel=0.05)


def test_the_worked_examples_in_words() -> None:
    text = describe_memory(70e9, "ppo", 80, 400)
    assert "2,520.0 GB: at least 32 x 80 GB" in text
    assert "140 GB of bf16 weights over 400 Gb/s takes 2.8 s" in text
    assert "1,260.0 GB: at least 16 x 80 GB" in describe_memory(70e9, "grpo", 80, 400)
    assert "works 40% of the time, with full overlap 67%" in describe_overlap(60, 40)


def test_predictions_hold_no_nan() -> None:
    for bound in (0, 3):
        for forecast in (closed_form(Workload(), bound), simulated(Workload(), bound, 40)):
            assert not any(math.isnan(value) for value in dataclasses.astuple(forecast))
            assert np.isfinite(forecast.step_s)
