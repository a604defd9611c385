"""The learner's waits for a batch, and for late groups alone, which `staleness.on_late: wait` costs."""

from __future__ import annotations

import asyncio

import pytest

from async_rl.base.config import StalenessConfig
from buffer.client import LearnerClient, WorkerClient
from buffer.operations import LearnerWaits
from buffer.store import Store
from tests.kit.buffer.arrivals import make_arrival, plain_rules
from tests.kit.buffer.clients import TIMEOUTS, with_worker
from tests.kit.buffer.serving import serving
from tests.kit.configs import buffer_config
from tests.kit.groups import make_group


def test_what_the_learner_does_between_two_questions_is_no_wait() -> None:
    """It asks from 100 to 103 and from 105 to 110; from 102 on only late groups are missing."""
    waits = LearnerWaits()
    waits.begin(102.0)
    waits.begin(102.5)
    waits.end(103.0)
    waits.begin(105.0)
    assert waits.hand_out(0, 110.0) == 6.0
    assert waits.hand_out(1, 112.0) == 0.0


def test_only_with_enough_other_groups_does_a_learner_wait_for_late_ones() -> None:
    """Bound 1, batches of 2: groups 0 to 3 start at version 0. At version 1 two of them must be in the last batch."""
    rules = plain_rules(1, 2)
    store = Store(rules)
    store.served(0)
    first, second, third, fourth = (slot.group_id for slot in store.admit("rollout/0", 9, 0.0))
    for group_id in (first, second):
        assert not store.misses_late
        store.finish(group_id, b"", make_arrival())
    assert store.take(0)
    store.trained(1)
    store.served(1)
    later = [slot.group_id for slot in store.admit("rollout/0", 9, 0.0)]
    for group_id in later:
        store.finish(group_id, b"", make_arrival(1))
    assert store.take(1) is None and store.misses_late
    store.finish(third, b"", make_arrival())
    store.finish(fourth, b"", make_arrival())
    assert [row.group_id for row in store.take(1) or ()] == [third, fourth]


def test_the_wait_comes_with_the_batch() -> None:
    """Bound 1, batches of 2: group 0 is late at version 1, for which groups 4 and 5 would be enough."""
    with serving(buffer_config(prompts_per_step=2, staleness=StalenessConfig(max=1))) as server:
        learner = LearnerClient(server.address, TIMEOUTS)
        learner.served(0)

        async def run(worker: WorkerClient) -> list[tuple[float, float]]:
            late, *others = await worker.admit(4)
            for slot in others[:2]:
                await worker.put(make_group(slot))
            first = await asyncio.to_thread(learner.take, 0)
            learner.trained(1)
            learner.served(1)
            for slot in (others[2], *await worker.admit(2)):
                await worker.put(make_group(slot))
            taking = asyncio.create_task(asyncio.to_thread(learner.take, 1))
            await asyncio.sleep(0.2)
            await worker.put(make_group(late))
            second = await taking
            keys = ("buffer/waited_for_late_s", "buffer/waited_s")
            return [tuple(batch.gauges[key] for key in keys) for batch in (first, second)]

        (first_late_s, first_s), (second_late_s, second_s) = with_worker(server.address, run)
        learner.close()
    assert first_late_s == 0 and first_s < 0.1, "it was ready when it was asked for"
    assert second_late_s == pytest.approx(0.2, abs=0.15) and second_late_s <= second_s < second_late_s + 0.1
