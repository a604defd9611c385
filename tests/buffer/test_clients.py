"""Real sockets: one buffer and its two kinds of clients."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import zmq

from async_rl.base.errors import AsyncRLError, WaitTimeoutError, WireError
from async_rl.base.types import Slot
from buffer.client import LearnerClient, WorkerClient
from buffer.operations import fair_shares
from buffer.server import BufferServer
from buffer.wire import read_reply, receive
from tests.kit.buffer.clients import QUICK, TIMEOUTS, learner_at, put_frames, run_pipeline, with_worker
from tests.kit.buffer.serving import serving
from tests.kit.configs import buffer_config
from tests.kit.groups import make_group


def test_a_step_at_bound_zero_takes_the_groups_in_id_order(buffer: BufferServer, learner: LearnerClient) -> None:
    async def produce(worker: WorkerClient) -> list[Slot]:
        slots = await worker.admit(100)
        for slot in reversed(slots):
            assert await worker.put(make_group(slot))
        return slots

    for version in range(3):
        slots = with_worker(buffer.address, produce)
        assert [slot.group_id for slot in slots] == list(range(4 * version, 4 * version + 4))
        batch = learner.take(version)
        assert batch.version == version and batch.finished_versions == (version,) * 4
        assert [group.group_id for group in batch.groups] == [slot.group_id for slot in slots]
        assert batch.groups[1].rows[1].tokens.tolist() == [0, 1, 2, 3]
        assert batch.gauges["buffer/held"] == 4 and batch.gauges["buffer/slots_held"] == 4
        learner.trained(version + 1)
        learner.served(version + 1)
    assert buffer.counters()["buffer/trained"] == 12


def train_first_batch(learner: LearnerClient) -> None:
    learner.take(0)
    learner.trained(1)
    learner.served(1)


def test_slots_are_shared_by_what_workers_can_start_by_then_and_not_when_they_asked() -> None:
    async def two_batches(address: str, learner: LearnerClient) -> list[int]:
        first, second = workers = [WorkerClient(address, f"rollout/{i}", TIMEOUTS) for i in range(2)]
        granted, (last,) = await asyncio.gather(first.admit(4), second.admit(1))
        await second.put(make_group(last))
        await first.put(make_group(granted[0]))
        asking = [asyncio.create_task(worker.admit(number)) for worker, number in zip(workers, (1, 4), strict=True)]
        await asyncio.sleep(0.05)
        for slot in granted[1:]:
            await first.put(make_group(slot))
        await asyncio.to_thread(train_first_batch, learner)
        again = await asyncio.gather(*asking)
        for worker in workers:
            await worker.close()
        return [len(granted), *map(len, again)]

    with serving(buffer_config(prompts_per_step=4, workers=2)) as server, learner_at(server) as learner:
        assert asyncio.run(two_batches(server.address, learner)) == [3, 2, 2]


def test_a_turn_that_takes_long_answers_before_it_reads_on(
    buffer: BufferServer, learner: LearnerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that the buffer reads in one turn share an answer. Here each message is a long turn."""
    monkeypatch.setattr("buffer.server.LONGEST_TURN_S", 0.0)
    slots = with_worker(buffer.address, lambda worker: worker.admit(4))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(buffer.address)
        for slot in slots:
            socket.send_multipart(put_frames(slot))
        for _ in slots:
            assert socket.poll(5000), "no answer"
            assert len(read_reply(receive(socket)).ids) == 1


def test_shares_go_to_the_workers_with_the_fewest_running() -> None:
    assert fair_shares(8, {"a": 100, "b": 100}, {}) == {"a": 4, "b": 4}
    assert fair_shares(8, {"a": 100, "b": 100}, {"a": 6}) == {"a": 1, "b": 7}
    assert fair_shares(8, {"a": 2, "b": 100}, {"b": 6}) == {"a": 2, "b": 6}
    assert fair_shares(8, {"a": 1, "b": 2}, {}) == {"a": 1, "b": 2}
    assert fair_shares(3, {"b": 9, "a": 9}, {}) == {"b": 2, "a": 1}


def test_slots_granted_to_a_cancelled_admit_go_to_the_next_one(buffer: BufferServer) -> None:
    async def run(worker: WorkerClient) -> list[Slot]:
        cancelled = asyncio.create_task(worker.admit(4))
        await asyncio.sleep(0.05)
        cancelled.cancel()
        learner = LearnerClient(buffer.address, TIMEOUTS)
        await asyncio.to_thread(learner.served, 0)
        learner.close()
        return await worker.admit(4)

    assert [slot.group_id for slot in with_worker(buffer.address, run)] == [0, 1, 2, 3]
    assert buffer.counters()["buffer/admitted"] == 4


def test_a_failed_or_abandoned_group_is_granted_again(buffer: BufferServer, learner: LearnerClient) -> None:
    async def fail_one(worker: WorkerClient) -> None:
        slots = await worker.admit(4)
        for _ in range(2):
            await worker.fail(slots[1].group_id, "engine restarted at \ud83d", requeue=True, data_row=7)
        await worker.put(make_group(slots[0]))

    with_worker(buffer.address, fail_one)
    assert buffer.abandon("rollout/0", 2) == 2
    slots = with_worker(buffer.address, lambda worker: worker.admit(9), incarnation=2)
    assert [(slot.group_id, slot.prompt_index) for slot in slots] == [(4, 1), (5, 2), (6, 3)]
    late = Slot(group_id=2, prompt_index=2, start_version=0)
    assert with_worker(buffer.address, lambda worker: worker.put(make_group(late)), incarnation=2) is False
    assert buffer.counters()["buffer/dropped_failed"] == 3


@pytest.mark.parametrize("told", [True, False], ids=["the driver tells", "the successor asks"])
def test_a_server_that_was_replaced_gets_no_slots_and_delivers_nothing(
    buffer: BufferServer, learner: LearnerClient, told: bool
) -> None:
    granted = with_worker(buffer.address, lambda worker: worker.admit(4))
    if told:
        assert buffer.abandon("rollout/0", 2) == 4
    again = with_worker(buffer.address, lambda worker: worker.admit(4), incarnation=2)
    assert [slot.prompt_index for slot in again] == [slot.prompt_index for slot in granted]
    for late in (lambda worker: worker.admit(1), lambda worker: worker.put(make_group(granted[0]))):
        with pytest.raises(WireError, match="incarnation: got 1"):
            with_worker(buffer.address, late)
    for slot in again:
        assert with_worker(buffer.address, lambda worker, slot=slot: worker.put(make_group(slot)), incarnation=2)
    assert [group.group_id for group in learner.take(0).groups] == [slot.group_id for slot in again]


def test_a_buffer_that_does_not_answer_is_named() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        address = f"tcp://127.0.0.1:{mute.bind_to_random_port('tcp://127.0.0.1')}"
        slow = dataclasses.replace(TIMEOUTS, buffer_s=0.2)
        learner = LearnerClient(address, slow)
        with pytest.raises(WaitTimeoutError, match=r"timeouts\.buffer_s"):
            learner.trained(1)
        learner.close()
        with pytest.raises(WaitTimeoutError, match=r"timeouts\.buffer_s"):
            with_worker(address, lambda worker: worker.put(make_group(0)), timeouts=slow)


def test_a_closed_client_ends_its_waits_with_an_error(buffer: BufferServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.05)

    async def run() -> None:
        worker = WorkerClient(buffer.address, "rollout/0", QUICK)
        waiting = asyncio.create_task(worker.admit(4))
        await asyncio.sleep(0)
        await worker.close()
        with pytest.raises(AsyncRLError, match=r"rollout/0.*admit"):
            await waiting

    asyncio.run(run())


def test_a_request_that_is_cancelled_ends_at_every_moment(buffer: BufferServer) -> None:
    async def cancel_after(turns: int, worker: WorkerClient) -> bool:
        asking = asyncio.create_task(worker.aborts([]))
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait((asking,), timeout=2.0)
        return asking.cancelled()

    async def cancel_all(worker: WorkerClient) -> list[bool]:
        return [await cancel_after(turns, worker) for turns in range(8)]

    assert with_worker(buffer.address, cancel_all) == [True] * 8


@pytest.mark.parametrize(("max_staleness", "workers"), [(0, 2), (1, 1), (3, 3)])
def test_over_sockets_the_bound_holds_and_every_group_is_trained_once(
    max_staleness: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.2)
    config = buffer_config(max_staleness=max_staleness, prompts_per_step=8, workers=workers)
    with serving(config) as server:
        batches = run_pipeline(server, config, steps=30, workers=workers)
        counters = server.counters()
    groups = [(batch, group) for batch in batches for group in batch.groups]
    assert len({group.group_id for _, group in groups}) == len(groups) == 240
    assert max(batch.version - group.oldest_version for batch, group in groups) <= max_staleness
    assert all(
        group.oldest_version <= finished <= batch.version
        for batch in batches
        for group, finished in zip(batch.groups, batch.finished_versions, strict=True)
    )
    assert counters["buffer/trained"] == 240 and counters["buffer/dropped_failed"] > 0
