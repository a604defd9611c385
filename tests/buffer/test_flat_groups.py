"""Groups in which every answer has one reward: how the store counts them, and with which sentence they end a run."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from buffer.client import LearnerClient
from buffer.flat_groups import FLAT_BATCHES, MANY_GROUPS, FlatGroups
from buffer.store import Store
from tests.kit.buffer.arrivals import make_arrival, plain_rules
from tests.kit.buffer.clients import TIMEOUTS, with_worker
from tests.kit.buffer.journal import journalled
from tests.kit.buffer.serving import serving, serving_until_a_crash


def test_one_group_with_variance_or_another_reward_starts_the_count_anew() -> None:
    store = Store(plain_rules(0, 1))
    store.served(0)
    rewards = [1.0] * (FLAT_BATCHES - 1) + [0.0] + [1.0] * (FLAT_BATCHES - 1)
    for reward in rewards:
        (slot,) = store.admit("rollout/0", 1, 0.0)
        store.finish(slot.group_id, b"", make_arrival(equal_rewards=True, reward=reward), drop_equal=True)
    assert not store.end_reason
    (slot,) = store.admit("rollout/0", 1, 0.0)
    store.finish(slot.group_id, b"", make_arrival(equal_rewards=True, reward=1.0), drop_equal=True)
    assert "seems to be solved" in store.end_reason and store.end_reason.endswith("Choose a harder one.")
    (slot,) = store.admit("rollout/0", 1, 0.0)  # one more group can disprove that, before the learner has asked
    store.finish(slot.group_id, b"", make_arrival(equal_rewards=False, reward=0.5), drop_equal=True)
    assert not store.end_reason


def test_flat_groups_that_are_kept_are_counted_and_end_nothing() -> None:
    store = Store(plain_rules(0, 1, fresh_per_step=100))
    store.served(0)
    counts = []
    for equal, reward in [(True, 1.0), (True, 1.0), (False, 1.0), *[(True, 0.0)] * FLAT_BATCHES]:
        (slot,) = store.admit("rollout/0", 1, 0.0)
        store.finish(slot.group_id, b"", make_arrival(equal_rewards=equal, reward=reward))
        counts.append(store.flat.num_same)
    assert counts == [1, 2, 0, *range(1, FLAT_BATCHES + 1)] and not store.end_reason


def test_groups_of_reward_zero_end_the_run_and_advise_an_easier_task() -> None:
    store = Store(plain_rules(0, 1))
    store.served(0)
    for _ in range(FLAT_BATCHES):
        (slot,) = store.admit("rollout/0", 1, 0.0)
        store.finish(slot.group_id, b"", make_arrival(equal_rewards=True, reward=0.0), drop_equal=True)
    assert "out of reach" in store.end_reason
    assert store.end_reason.endswith("Choose an easier one, or raise rollout.group_size.")


def added(flat: FlatGroups, *rewards: float, equal: bool = True, epoch: int = 0) -> str:
    for reward in rewards:
        flat.add(make_arrival(equal_rewards=equal, reward=reward))
    return flat.why_nothing_is_left(7, epoch)


def test_groups_that_are_flat_at_different_rewards_end_the_run_in_order() -> None:
    store = Store(plain_rules(0, 1))
    store.served(0)
    for number in range(MANY_GROUPS):
        assert not store.end_reason
        (slot,) = store.admit("rollout/0", 1, 0.0)
        arrival = make_arrival(equal_rewards=True, reward=float(number % 2))
        store.finish(slot.group_id, b"", arrival, drop_equal=True)
    assert store.end_reason.startswith("4096 groups in a row had one reward for all of their answers, though not each")
    assert "no prompt's answers differed when it was asked last" in store.end_reason
    assert "4096 dropped as zero_variance since the last batch" in store.describe(0.0)


def test_one_group_with_a_difference_keeps_a_run_of_flat_groups_alive() -> None:
    flat = FlatGroups(1, lambda reward: reward >= 1)
    almost = [float(number % 2) for number in range(MANY_GROUPS - 1)]
    assert not added(flat, *almost)
    assert not added(flat, 0.5, equal=False)
    assert not added(flat, *almost)
    assert added(flat, 1.0).startswith("4096 groups in a row")


@pytest.mark.parametrize(("epoch", "ends_after"), [
    (0, 8), (8, 8), (9, 9), (1000, 1000), (MANY_GROUPS, MANY_GROUPS), (10**6, MANY_GROUPS),
])
def test_groups_of_one_reward_end_a_run_once_each_prompt_has_had_its_turn(epoch: int, ends_after: int) -> None:
    flat = FlatGroups(1, lambda reward: reward >= 1)
    assert not added(flat, *[0.0] * (ends_after - 1), epoch=epoch)
    assert added(flat, 0.0, epoch=epoch).startswith(f"{ends_after} groups in a row had the same reward, 0, for every")


def test_groups_of_different_rewards_end_no_run_before_each_prompt_has_had_its_turn() -> None:
    flat, epoch = FlatGroups(1, lambda reward: reward >= 1), MANY_GROUPS + 2
    assert not added(flat, *[0.0, 1.0] * (MANY_GROUPS // 2), 0.0, epoch=epoch)
    assert added(flat, 1.0, epoch=epoch).startswith("4098 groups in a row")


@pytest.mark.parametrize(("prompts_per_step", "share"), [(8, 0.05), (32, 0.02)])
def test_a_hard_task_of_which_few_prompts_are_within_reach_goes_on(prompts_per_step: int, share: float) -> None:
    rng, store = random.Random(0), Store(plain_rules(1, prompts_per_step))
    store.state.prompts.learn([[10_000, 10_000]])
    store.served(0)
    for version in range(60):
        while not store.take(version):
            assert not store.end_reason
            (slot,) = store.admit("rollout/0", 1, 0.0)
            has_right = rng.random() < share
            arrival = make_arrival(version, equal_rewards=not has_right, reward=0.25 if has_right else 0.0)
            store.finish(slot.group_id, b"", arrival, drop_equal=True)
        store.trained(version + 1)
        store.served(version + 1)


def test_a_worker_tells_the_size_of_an_epoch_and_a_buffer_that_starts_again_knows_it(tmp_path: Path) -> None:
    config = journalled(tmp_path)
    with serving_until_a_crash(config) as server:
        with_worker(server.address, lambda worker: worker.tell_prompts([(30, 10), (7, np.int64(7))]))
        learner = LearnerClient(server.address, TIMEOUTS)
        learner.served(0)
        learner.close()
        assert server._store.state.prompts.num_per_epoch == 17
    with serving(config) as again:
        assert again._store.state.prompts.num_per_epoch == 17


def test_a_large_batch_raises_the_number_of_flat_groups_that_end_a_run() -> None:
    flat = FlatGroups(1000, lambda reward: reward >= 1)
    assert not added(flat, *[0.0, 1.0] * (FLAT_BATCHES * 500 - 1))
    assert added(flat, 0.0, 1.0).startswith("8000 groups in a row")


@pytest.mark.parametrize(("reward", "right_above", "told"), [
    (1.0, 1.0, "to be solved"), (0.5, 0.5, "to be solved"), (-0.2, -0.5, "to be solved"),
    (0.0, 1.0, "to be out of reach"), (-1.0, 1.0, "to be out of reach"),
    (0.1, 1.0, "to have nothing left to teach at version 7. This reward is neither that of a right answer"),
])
def test_the_end_tells_a_solved_task_by_the_reward_of_a_right_answer(
    reward: float, right_above: float, told: str
) -> None:
    flat = FlatGroups(1, lambda value: value >= right_above)
    reason = added(flat, *[reward] * FLAT_BATCHES)
    assert f"the same reward, {reward:g}, for every answer: the task seems {told}" in reason


def test_the_groups_dropped_for_equal_rewards_are_told_since_the_last_batch() -> None:
    store = Store(plain_rules(1, 1))
    store.served(0)
    for equal in (True, False, True, True):
        (slot,) = store.admit("rollout/0", 1, 0.0)
        store.finish(slot.group_id, b"", make_arrival(equal_rewards=equal), drop_equal=True)
        if not equal:
            assert "1 dropped as zero_variance" in store.describe(0.0)
            assert store.take(0)
            assert "zero_variance" not in store.describe(0.0)
    assert "2 dropped as zero_variance since the last batch (algorithm.filter_zero_variance" in store.describe(0.0)
