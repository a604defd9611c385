"""The simulator against times that follow from its workload by hand."""

from __future__ import annotations

import dataclasses

import pytest

from async_rl.base.errors import ConfigError
from buffer.simulate import Workload, simulate

pytestmark = pytest.mark.processes  # together they compute for long

EQUAL = Workload(prompts_per_step=4, concurrency=100, train_s=10.0, sync_s=0.0, group_mean_s=8.0, group_cv=0.0)
STEADY = Workload(concurrency=64, prompts_per_step=64, train_s=40.0, sync_s=0.0, group_mean_s=60.0, group_cv=0.0)
"""60 s of generation, 40 s of learning."""
ROOMY = dataclasses.replace(STEADY, concurrency=128)


def test_the_mean_staleness_is_the_depth_and_the_largest_stays_within_the_bound() -> None:
    result = simulate(dataclasses.replace(EQUAL, group_cv=1.5), 8, 200, depth=1.5)
    assert result.mean_staleness == pytest.approx(1.5, abs=0.1)
    assert 1.5 < result.max_staleness <= 8


def test_simulation_of_a_60_40_split() -> None:
    """In turn the learner works 40 s of 100; overlapped, generation is the bottleneck: 40 s of 60."""
    at_0, at_1 = simulate(STEADY, 0, 150), simulate(STEADY, 1, 150)
    assert (at_0.step_s, at_0.utilisation, at_0.rollout) == pytest.approx((100, 0.4, 0.6), rel=0.02)
    assert (at_1.step_s, at_1.utilisation, at_1.rollout) == pytest.approx((60, 2 / 3, 1.0), rel=0.02)
    assert at_0.mean_staleness == 0.0
    assert at_1.mean_staleness == pytest.approx(1.0, rel=0.02)


def test_a_full_engine_gives_the_same_throughput_at_every_load_and_to_dropped_groups() -> None:
    """load_s = group_mean_s: 32 groups alone take 32 * 0.1 s, 64 at once twice as long."""
    full = Workload(
        concurrency=64, prompts_per_step=32, train_s=1.0, sync_s=0.0, group_mean_s=0.1, load_s=0.1, group_cv=0.0
    )  # fmt: skip
    assert simulate(full, 0, 20).step_s == pytest.approx(4.2)
    assert simulate(full, 1, 400).step_s == pytest.approx(3.2, rel=0.02)
    dropped = dataclasses.replace(full, train_s=0.0, failed=0.5)
    assert simulate(dropped, 1, 400).step_s == pytest.approx(6.4, rel=0.05), "they are generated all the same"


def test_the_simulated_rollout_pool_is_busy_while_a_group_is_in_flight() -> None:
    result = simulate(dataclasses.replace(STEADY, sync_s=5.0), 0, 50)
    assert result.step_s == pytest.approx(105)
    assert result.rollout == pytest.approx(60 / 105)
    assert result.in_flight == pytest.approx(60 / 105)  # all 64 until the end of the batch


def test_with_a_push_every_other_step_a_round_has_two_trainings_on_it() -> None:
    """At bound 1 both batches start at a push: 60 s of generation, 2 * 40 of training, 10 of pushing, for 2 steps."""
    workload = dataclasses.replace(ROOMY, sync_s=10.0, every_steps=2)
    assert simulate(workload, 1, 150).step_s == pytest.approx(75, rel=0.01)


def test_a_push_that_drains_waits_for_the_groups_in_flight() -> None:
    """In place, two batches share a round of 60 + 40 s. With drain, the batch that started at a push is what the next
    push waits for.
    """
    assert simulate(ROOMY, 1, 150).step_s == pytest.approx(50, rel=0.01)
    assert simulate(dataclasses.replace(ROOMY, drain=True), 1, 150).step_s == pytest.approx(60, rel=0.01)


def test_groups_used_twice_halve_the_step_of_a_slow_rollout_pool() -> None:
    slow = dataclasses.replace(STEADY, train_s=1.0)
    assert simulate(slow, 4, 150).step_s == pytest.approx(60, rel=0.01)
    twice = dataclasses.replace(slow, max_uses=2, fresh_fraction=0.5)
    assert simulate(twice, 4, 150).step_s == pytest.approx(30, rel=0.02)


def test_a_bound_that_would_stop_the_learner_for_ever_is_refused() -> None:
    """Two batches of 64 between pushes need 128 slots, which bound 1 has. Of 32 fresh ones bound 3 has as many."""
    every_other = dataclasses.replace(STEADY, every_steps=2)
    used_again = {"max_uses": 2, "fresh_fraction": 0.5}
    for workload, depth in (
        (every_other, 1), (dataclasses.replace(every_other, **used_again), 3),
        (dataclasses.replace(STEADY, max_uses=2, fresh_fraction=0.9), 1), (STEADY, 0),
    ):
        assert workload.slot_limits.smallest_depth == depth
    with pytest.raises(ConfigError, match=r"^staleness\.depth .*every_steps 2, got 0"):
        simulate(every_other, 0, 10)


def test_every_policy_for_late_groups_keeps_the_bound() -> None:
    """With long tails the learner waits, unless late groups are dropped or their old tokens are masked."""
    for bound in (0, 1, 3):
        wait, drop, mask = (
            simulate(dataclasses.replace(Workload(), late=late), bound, 60)  # type: ignore[arg-type]
            for late in ("wait", "drop", "mask")
        )
        assert [found.max_staleness for found in (wait, drop, mask)] == [bound] * 3
        assert wait.dropped == mask.dropped == 0 < drop.dropped + (bound == 0)
        assert (min(drop.utilisation, mask.utilisation) > 1.2 * wait.utilisation) == (bound > 0)
