"""Groups in which every answer has one reward: how the store counts them, and when they end a run."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from async_rl.base.errors import NothingToLearnError, WaitTimeoutError
from buffer.client import LearnerClient, WorkerClient
from buffer.store import Store
from buffer.store_state import FLAT_BATCHES, MANY_GROUPS, FlatGroups
from tests.kit.buffer.arrivals import make_arrival, plain_rules
from tests.kit.buffer.clients import TIMEOUTS, with_worker
from tests.kit.buffer.journal import journalled
from tests.kit.buffer.serving import serving, serving_until_a_crash
from tests.kit.configs import changed
from tests.kit.groups import make_group


def finish_one(store: Store, reward: float, equal: bool = True, drop: bool = True) -> None:
    (slot,) = store.admit("rollout/0", 1, 0.0)
    store.finish(slot.group_id, b"", make_arrival(equal_rewards=equal, reward=reward), drop_equal=drop)


def test_one_group_with_variance_or_another_reward_starts_the_count_anew() -> None:
    store = Store(plain_rules(0, 1))
    store.served(0)
    for reward in [1.0] * (FLAT_BATCHES - 1) + [0.0] + [1.0] * (FLAT_BATCHES - 1):
        finish_one(store, reward)
    assert not store.end_reason
    finish_one(store, 1.0)
    assert store.end_reason
    finish_one(store, 0.5, equal=False)  # it can disprove that, before the learner has asked
    assert not store.end_reason


def test_flat_groups_that_are_kept_are_counted_and_end_nothing() -> None:
    store = Store(plain_rules(0, 1, fresh_per_step=100))
    store.served(0)
    counts = []
    for equal, reward in [(True, 1.0), (True, 1.0), (False, 1.0), *[(True, 0.0)] * FLAT_BATCHES]:
        finish_one(store, reward, equal, drop=False)
        counts.append(store.flat.num_same)
    assert counts == [1, 2, 0, *range(1, FLAT_BATCHES + 1)] and not store.end_reason


def groups_until_the_end(flat: FlatGroups, *rewards: float, epoch: int = 0) -> int:
    """How many flat groups, of these rewards in turn, end a run."""
    for number, reward in enumerate(itertools.cycle(rewards), 1):
        flat.add(make_arrival(equal_rewards=True, reward=reward))
        if flat.why_nothing_is_left(7, epoch):
            return number
    raise AssertionError


@pytest.mark.parametrize(("prompts_per_step", "rewards", "epoch", "ends_after"), [
    (1, [0.0], 0, 8), (1, [0.0], 8, 8), (1, [0.0], 9, 9), (1, [0.0], 1000, 1000),
    (1, [0.0], MANY_GROUPS, MANY_GROUPS), (1, [0.0], 10**6, MANY_GROUPS),
    (1, [0.0, 1.0], 0, MANY_GROUPS), (1, [0.0, 1.0], MANY_GROUPS + 2, MANY_GROUPS + 2), (1000, [0.0, 1.0], 0, 8000),
])  # fmt: skip
def test_flat_groups_end_a_run_once_each_prompt_has_had_its_turn(
    prompts_per_step: int, rewards: list[float], epoch: int, ends_after: int
) -> None:
    flat = FlatGroups(prompts_per_step, lambda reward: reward >= 1)
    assert groups_until_the_end(flat, *rewards, epoch=epoch) == ends_after


@pytest.mark.parametrize(("prompts_per_step", "share"), [(8, 0.05), (32, 0.02)])
def test_a_hard_task_of_which_few_prompts_are_within_reach_goes_on(prompts_per_step: int, share: float) -> None:
    rng, store = random.Random(0), Store(plain_rules(1, prompts_per_step))
    store.state.prompts.learn([[10_000, 10_000]])
    store.served(0)
    for version in range(480 // prompts_per_step):
        while not store.take(version):
            assert not store.end_reason
            (slot,) = store.admit("rollout/0", 1, 0.0)
            has_right = rng.random() < share
            arrival = make_arrival(version, equal_rewards=not has_right, reward=0.25 if has_right else 0.0)
            store.finish(slot.group_id, b"", arrival, drop_equal=True)
        store.trained(version + 1)
        store.served(version + 1)


def test_a_worker_tells_the_size_of_an_epoch_and_a_buffer_that_starts_again_knows_it(tmp_path: Path) -> None:
    config = changed(journalled(tmp_path, prompts_per_step=1), algorithm={"filter_zero_variance": True})
    with serving_until_a_crash(config) as server:
        with_worker(server.address, lambda worker: worker.tell_prompts([(30, 10), (7, np.int64(7))]))
        learner = LearnerClient(server.address, TIMEOUTS)
        learner.served(0)
        learner.close()

    async def put_flat(worker: WorkerClient, number: int) -> None:
        for _ in range(number):
            (slot,) = await worker.admit(1)
            await worker.put(make_group(slot))

    with serving(config) as again:
        learner = LearnerClient(again.address, replace(TIMEOUTS, batch_s=0.1))
        for number, error in ((16, WaitTimeoutError), (1, NothingToLearnError)):
            with_worker(again.address, lambda worker, number=number: put_flat(worker, number))
            with pytest.raises(error):
                learner.take(0)
        learner.close()
