"""The outcome of a group: means and comparisons over its episodes, not over their rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_rl.base.config import AlgorithmConfig
from async_rl.base.messages.codec import check_group, encode_group
from async_rl.base.messages.limits import Limits
from async_rl.base.types import Group, Slot
from buffer.client import WorkerClient
from buffer.stored_group import Arrival
from buffer.wire import pack_request
from tests.kit.buffer.clients import ask, with_worker
from tests.kit.buffer.serving import serving
from tests.kit.configs import buffer_config
from tests.kit.groups import make_group, make_row
from tests.kit.random_episodes import LIMITS, random_episodes

SLOT = Slot(group_id=0, prompt_index=0, start_version=0)


def outcome(group: Group) -> Arrival:
    return Arrival.of(check_group(encode_group(group), LIMITS))


def with_rewards(group: Group, rewards: tuple[float, float]) -> Group:
    """Give both episodes of a group these rewards, with the last turn of their first row."""
    rows = list(group.rows)
    for first, end, reward in zip((0, group.episodes[0].rows), (group.episodes[0].rows, None), rewards, strict=True):
        of_episode = [
            dataclasses.replace(row, reward=reward, turn_rewards=(0.0,) * len(row.turn_ends))
            for row in rows[first:end]
        ]
        first_row = of_episode[0]
        turn_rewards = (*[0.0] * (len(first_row.turn_ends) - 1), reward)
        of_episode[0] = dataclasses.replace(first_row, turn_rewards=turn_rewards)
        rows[first:end] = of_episode
    return dataclasses.replace(group, rows=tuple(rows))


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


def test_a_group_whose_episodes_have_equal_rewards_is_dropped() -> None:
    config = buffer_config()
    task = dataclasses.replace(config.task, env="my_games:Game")
    config = dataclasses.replace(config, task=task, algorithm=AlgorithmConfig(filter_zero_variance=True))
    rng = np.random.default_rng(0)

    async def put_both(worker: WorkerClient) -> None:
        equal, different = await worker.admit(2)
        assert await worker.put(with_rewards(random_episodes(equal, rng), (0.5, 0.5)))
        assert await worker.put(with_rewards(random_episodes(different, rng), (0.5, 1.0)))

    with serving(config) as server:
        ask(server.address, [pack_request("served", 1, version=0)])
        with_worker(server.address, put_both)
        counters = server.counters()
    assert (counters["buffer/dropped_zero_variance"], counters["buffer/depth"]) == (1, 1)
    assert counters["buffer/dropped_zero_variance/reward"] == 0.5
