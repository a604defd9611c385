"""The outcome of a group: means and comparisons over its episodes, not over their rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.base.messages.codec import check_group, encode_group
from async_rl.base.messages.fields import Limits
from async_rl.base.types import Group, Slot
from buffer.store_state import Arrival
from tests.kit.groups import make_group, make_row
from tests.kit.random_episodes import LIMITS, random_episodes

SLOT = Slot(group_id=0, prompt_index=0, start_version=0)


def outcome(group: Group) -> Arrival:
    return Arrival.of(check_group(encode_group(group), LIMITS))


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_means_are_over_episodes_and_count_trained_tokens(seed: int) -> None:
    group = random_episodes(SLOT, np.random.default_rng(seed), newest=4)
    found = outcome(group)
    rewards, tokens, rows = [], [], iter(group.rows)
    for episode in group.episodes:
        of_episode = [next(rows) for _ in range(episode.rows)]
        rewards.append(of_episode[0].reward)
        tokens.append(sum(int(m) for row in of_episode for m in row.mask))
    assert found.reward == pytest.approx(np.mean(rewards)) and found.response_tokens == np.mean(tokens)
    assert found.equal_rewards == (len(set(rewards)) == 1)
    assert found.newest_version == max(int(v) for row in group.rows for v in row.versions[row.mask])
    assert found.duration_s == group.duration_s


@pytest.mark.parametrize("size", [2, 5, 6, 10])
def test_the_mean_of_equal_rewards_is_exactly_each_of_them(size: int) -> None:
    """In floats (0.1 + ... + 0.1) / 6 may be below 0.1: flat groups of one reward would then count as different."""
    data = encode_group(make_group(SLOT, rows=[make_row(reward=0.1)] * size))
    arrival = Arrival.of(check_group(data, Limits.of_stored(data, size)))
    assert (arrival.reward, arrival.equal_rewards) == (0.1, True)
