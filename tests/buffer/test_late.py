"""Late policies, exact mode and groups without variance, over real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from async_rl.base.config import AlgorithmConfig, EvalConfig
from async_rl.base.errors import NothingToLearnError, WaitTimeoutError
from buffer.client import LearnerClient, WorkerClient
from buffer.store_state import FLAT_BATCHES
from tests.kit.buffer.clients import QUICK, learner_at, put_all, with_worker
from tests.kit.buffer.serving import serving
from tests.kit.configs import buffer_config
from tests.kit.groups import make_group, make_row


def test_a_worker_is_told_of_dropped_groups_until_it_acknowledges_them() -> None:
    config = buffer_config(prompts_per_step=2, staleness={"max": 1, "on_late": "drop"})
    with serving(config) as server, learner_at(server) as learner:

        async def run(worker: WorkerClient) -> None:
            slots = await worker.admit(4)
            for slot in slots[2:]:
                await worker.put(make_group(slot))
            learner.take(0)
            learner.trained(1)
            learner.served(1)
            more = await worker.admit(4)
            assert [slot.start_version for slot in more] == [1, 1]
            for slot in more:
                await worker.put(make_group(slot, rows=(make_row(version=1),) * 2))
            batch = learner.take(1)  # the two of version 0 that still run can only miss their deadline
            assert [group.group_id for group in batch.groups] == [4, 5]
            assert await worker.aborts([]) == await worker.aborts([]) == [0, 1]
            assert await worker.put(make_group(slots[0])) is False
            again = await worker.admit(2)
            assert [slot.prompt_index for slot in again] == [0, 1]

        with_worker(server.address, run)
        counters = server.counters()
        assert counters["buffer/dropped_late"] == counters["buffer/requeued"] == 2
        assert counters["buffer/unaccounted"] == 0
        assert counters["buffer/trained/response_tokens"] == 3.5
        assert counters["buffer/dropped_late/duration_s"] >= 0 and "buffer/dropped_late/reward" not in counters


def test_a_push_in_exact_mode_waits_for_the_groups_of_the_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.05)
    config = buffer_config(
        prompts_per_step=2, staleness={"max": 1, "mode": "exact"}, weight_sync={"on_update": "drain"}
    )
    with serving(config) as server, learner_at(server) as learner:

        async def run(worker: WorkerClient) -> None:
            slots = await worker.admit(9)
            for slot in slots[:3]:
                await worker.put(make_group(slot))
            learner.take(0)
            learner.trained(1)
            hasty = LearnerClient(server.address, replace(QUICK, batch_s=0.2))
            with pytest.raises(WaitTimeoutError, match=r"timeouts\.batch_s.* version 1, .* 1 of 2 .* batch 1 .* 1 run"):
                hasty.await_push(1)
            hasty.close()
            await worker.fail(slots[3].group_id, "drawn", requeue=True)
            (again,) = await worker.admit(9)
            assert (again.prompt_index, again.start_version) == (3, 0)
            await worker.put(make_group(again))
            learner.await_push(1)
            learner.served(1)

        with_worker(server.address, run)
        assert [group.group_id for group in learner.take(1).groups] == [2, 4]


def test_a_solved_task_ends_a_push_that_waits_in_exact_mode() -> None:
    """Bound 1, batches of 2: after batch 0 the push waits for the groups of batch 1, which are all dropped."""
    config = buffer_config(
        prompts_per_step=2, staleness={"max": 1, "mode": "exact"}, weight_sync={"on_update": "drain"},
        algorithm=AlgorithmConfig(),
    )
    with serving(config) as server, learner_at(server) as learner:

        async def first_batch(worker: WorkerClient) -> None:
            for slot in (await worker.admit(9))[:2]:
                await worker.put(make_group(slot, rows=(make_row(reward=0.0), make_row(reward=1.0))))

        with_worker(server.address, first_batch)
        learner.take(0)
        learner.trained(1)
        server.abandon("rollout/0", 2)
        for _ in range(FLAT_BATCHES):
            with_worker(server.address, put_all, incarnation=2)
        with pytest.raises(NothingToLearnError, match=r"^16 groups"):
            learner.await_push(1)


def test_a_push_that_shuts_admission_is_not_ended_by_a_solved_task() -> None:
    config = buffer_config(
        1, prompts_per_step=2, weight_sync={"on_update": "drain"}, algorithm=AlgorithmConfig(),
    )
    with serving(config) as server, learner_at(server) as learner:

        async def run(worker: WorkerClient) -> None:
            slots = await worker.admit(4)
            for slot in slots[:2]:
                await worker.put(make_group(slot, rows=(make_row(reward=0.0), make_row(reward=1.0))))
            learner.take(0)
            learner.trained(1)
            await worker.put(make_group(slots[2]))
            for _ in range(2 * FLAT_BATCHES):
                (slot,) = await worker.admit(1)
                await worker.put(make_group(slot))
            waiting = asyncio.create_task(asyncio.to_thread(learner.await_push, 1))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            await worker.put(make_group(slots[3]))
            await waiting

        with_worker(server.address, run)


def test_a_solved_task_ends_the_run() -> None:
    config = buffer_config(prompts_per_step=2, algorithm=AlgorithmConfig(), eval=EvalConfig(num_prompts=0,
        correct_threshold=0.5))
    with serving(config) as server, learner_at(server) as learner:

        async def counts(worker: WorkerClient) -> tuple[int, int]:
            await put_all(worker)
            return worker.flat_groups

        for number in range(1, FLAT_BATCHES + 1):
            assert with_worker(server.address, counts) == (2 * number, 2 * number)
        with pytest.raises(NothingToLearnError, match=r"^16 groups .* 0.5, .* solved"):
            learner.take(0)
        counters = server.counters()
        assert counters["buffer/dropped_zero_variance"] == 16 and counters["buffer/requeued"] == 0
        assert counters["buffer/dropped_zero_variance/reward"] == 0.5
