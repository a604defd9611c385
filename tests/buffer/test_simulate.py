from __future__ import annotations

import dataclasses

import pytest

from buffer.simulate import Workload, simulate

EQUAL = Workload(prompts_per_step=4, concurrency=100, train_s=10.0, sync_s=0.0, group_mean_s=8.0, group_cv=0.0)


def test_figures_count_from_the_end_of_the_first_step() -> None:
    assert simulate(EQUAL, 3, 30).mean_staleness == pytest.approx((1 + 2 + 27 * 3) / 29)


def test_the_mean_staleness_is_the_depth_and_the_largest_stays_within_the_bound() -> None:
    result = simulate(dataclasses.replace(EQUAL, group_cv=1.5), 8, 200, depth=1.5)
    assert result.mean_staleness == pytest.approx(1.5, abs=0.1)
    assert 1.5 < result.max_staleness <= 8


def test_groups_take_equally_long_at_every_depth() -> None:
    one_by_one = dataclasses.replace(EQUAL, concurrency=1, train_s=0.0, group_cv=1.0)
    found = [simulate(one_by_one, 8, 50, depth=depth).step_s for depth in (1, 2.5, 8)]
    assert found == pytest.approx([found[0]] * 3)
