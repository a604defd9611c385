"""The simulator with groups of episodes of several turns, against schedules worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.late_policies import POLICIES
from benchmarks.simulate import Workload, simulate
from benchmarks.simulated_rollout import EpisodeTimes, GroupTimes


def one(generate_s: float, turns: int = 1, tools_s: float = 0.0) -> GroupTimes:
    return GroupTimes((EpisodeTimes(turns, generate_s, tools_s),))


def replayed(*groups: GroupTimes, **settings: Any) -> Workload:
    """A workload in which the groups take the given times alone."""
    episodes = [episode.generate_s for group in groups for episode in group.episodes]
    plain = {"train_s": 1.0, "sync_s": 0.0, "group_mean_s": sum(episodes) / len(episodes)}
    return Workload(groups=groups, **{**plain, **settings})


def test_a_group_ends_with_its_slowest_episode_and_its_rewards() -> None:
    """Two turns of 1 s with 3 s of tools between them take 5 s, the rewards .5 s, and training 1 s."""
    group = GroupTimes((EpisodeTimes(2, 2.0, 3.0), EpisodeTimes(1, 1.0, 0.0), EpisodeTimes(1, 1.5, 2.0)), 0.5)
    found = simulate(replayed(group, concurrency=1, prompts_per_step=1), 0, 10)
    assert (found.step_s, found.utilisation, found.rollout) == pytest.approx((6.5, 1 / 6.5, 5.5 / 6.5))
    assert found.in_flight == pytest.approx(5.5 / 6.5)


def test_a_full_engine_is_shared_by_those_that_sample_and_not_by_tools() -> None:
    """Both sample half a second's work together until 1.0. One goes on alone until 1.5. The other has tools until 2.0,
    and samples alone until 2.5.
    """
    quick, slow = one(1.0, turns=2), one(1.0, turns=2, tools_s=1.0)
    workload = replayed(quick, slow, concurrency=2, prompts_per_step=2, load_s=1.0)
    assert simulate(workload, 0, 10).step_s == pytest.approx(3.5)


def test_long_tools_cost_no_throughput_if_there_are_slots_enough() -> None:
    """A full engine samples 16 groups in 1.6 s, though each spends 5 to 15 s with its tools. In turn it takes 1.61 s
    more than the longest tools, because all begin and end their sampling together.
    """
    spread = [one(0.1, turns=2, tools_s=5.0 + number * 7 % 11) for number in range(11)]
    workload = replayed(*spread, concurrency=512, prompts_per_step=16, load_s=0.1, train_s=0.01)
    assert simulate(workload, 20, 100).step_s == pytest.approx(1.6, rel=0.05)
    same = replayed(one(0.1, turns=2, tools_s=10.0), concurrency=512, prompts_per_step=16, load_s=0.1, train_s=0.01)
    assert simulate(same, 0, 20).step_s == pytest.approx(11.61)


def test_dropped_prompts_are_as_long_the_next_time() -> None:
    """Prompt 3 is too long for its deadline: it is granted again and dropped again, and all others are trained."""
    groups = (*(one(1.0) for _ in range(3)), one(90.0), *(one(1.0) for _ in range(30)))
    workload = replayed(*groups, concurrency=8, prompts_per_step=2, late="drop")
    found = simulate(workload, 1, 8)
    assert found.dropped > 0.1
    assert found.dropped_length == pytest.approx(90 / (90 * found.dropped + 1 - found.dropped))
    assert found.dropped_duration == pytest.approx(found.dropped_length)


ONE_SLOW = (one(1.0), one(9.5), *(one(1.0) for _ in range(6)))
"""Batches of one group, bound 1: group 1 is sampled from 0 to 9.5 while another takes its turn every two seconds."""


def test_tokens_of_versions_that_are_too_old_are_masked() -> None:
    """Version v is served at 2 v. Batch 5 has group 1, of which it trains what versions 4 and 5 sampled, from 8.0 on.
    It begins at 10.0 without a wait.
    """
    workload = replayed(*ONE_SLOW, concurrency=2, prompts_per_step=1, late="mask")
    found = simulate(workload, 1, 6)
    assert found.masked == pytest.approx(8.0 / (5 * 1.0 + 9.5))
    assert found.step_s == pytest.approx((11.0 - 2.0) / 5)
    assert (found.dropped, found.max_staleness) == (0.0, 1)


def test_waiting_for_the_slow_group_masks_nothing() -> None:
    """Batch 1 waits for group 1 until 9.5, and batch 2 has been ready since: steps end at 2.0, 10.5 and 11.5."""
    found = simulate(replayed(*ONE_SLOW, concurrency=2, prompts_per_step=1), 1, 3)
    assert found.step_s == pytest.approx((11.5 - 2.0) / 2)
    assert (found.masked, found.dropped, found.max_staleness) == (0.0, 0.0, 1)


def test_a_push_that_drains_waits_for_whole_groups() -> None:
    """Group 1 has tools from 1 to 11. The first push ends at 12, and the steps after it take 1 s."""
    groups = (one(1.0), one(2.0, turns=2, tools_s=10.0), *(one(1.0) for _ in range(6)))
    whole = replayed(*groups, concurrency=3, prompts_per_step=1, drain=True)
    assert simulate(whole, 2, 3).step_s == pytest.approx(1.0)


SOME_SECONDS = st.floats(0.01, 20)


@settings(max_examples=30, deadline=None)
@given(
    groups=st.lists(
        st.builds(
            GroupTimes,
            st.lists(st.builds(EpisodeTimes, st.integers(1, 4), SOME_SECONDS, SOME_SECONDS), min_size=1, max_size=3)
            .map(tuple), st.sampled_from([0.0, 0.5]),
        ), min_size=1, max_size=6,
    ),
    late=st.sampled_from(POLICIES), bound=st.integers(0, 3), full=st.sampled_from([0.0, 0.5, 1.0]),
    drain=st.booleans(),
)  # fmt: skip
def test_every_policy_keeps_the_bound_and_pays_in_its_own_way(
    groups: list[GroupTimes], late: Any, bound: int, full: float, drain: bool
) -> None:
    plain = replayed(*groups, concurrency=6, prompts_per_step=2, late=late, sync_s=0.2, drain=drain)
    workload = Workload(**{**vars(plain), "load_s": full * plain.group_mean_s})
    found = simulate(workload, bound, 8)
    assert found.max_staleness <= bound and 0 <= found.mean_staleness <= bound
    assert 0 < found.utilisation <= 1 and 0 < max(found.rollout, found.in_flight) <= 1 + 1e-9
    assert found.dropped == 0 or (late != "wait" and bound > 0)
    assert found.masked == 0 or (late == "mask" and found.masked < 1)
