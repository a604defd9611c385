"""Workers that join a run and leave it: who gets slots, and whose groups still arrive."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.base.errors import WireError
from async_rl.base.types import Slot
from buffer.client import WorkerClient
from buffer.journal import FILE_NAME
from tests.kit.buffer.clients import TIMEOUTS, learner_at, put_all, with_worker
from tests.kit.buffer.journal import journalled
from tests.kit.buffer.serving import serving, serving_until_a_crash
from tests.kit.configs import buffer_config
from tests.kit.groups import make_group

UP_TO_TWO = {"rollout": {"servers": {"min": 1, "max": 2}}}


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that gets no slots asks for 0.3 s."""
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.3)


async def admit(worker: WorkerClient) -> list[Slot]:
    return await worker.admit(100)


def test_a_worker_that_leaves_gets_no_slots_and_delivers_its_groups() -> None:
    with serving(buffer_config(1, placement=UP_TO_TWO)) as server, learner_at(server) as learner:
        running = with_worker(server.address, lambda worker: worker.admit(3))
        assert server.retire("rollout/0", 1) == 3
        assert with_worker(server.address, admit) == []
        assert len(with_worker(server.address, lambda worker: worker.admit(1), "rollout/1")) == 1
        for left, slot in enumerate(reversed(running)):
            assert with_worker(server.address, lambda worker, slot=slot: worker.put(make_group(slot)))
            assert server.retire("rollout/0", 1) == 2 - left
        assert with_worker(server.address, admit) == [], "a group that ends does not bring a slot"
        assert server.abandon("rollout/0", 2) == 0
        again = with_worker(server.address, lambda worker: worker.admit(1), incarnation=2)
        assert len(again) == 1, "a later start of the worker gets slots"
        with_worker(server.address, lambda worker: worker.put(make_group(again[0])), incarnation=2)
        trained = {group.group_id for group in learner.take(0).groups}
        assert trained == {slot.group_id for slot in (*running, *again)}


def test_a_request_for_slots_that_waits_while_its_worker_retires_brings_none() -> None:
    async def run(worker: WorkerClient) -> list[Slot]:
        asking = asyncio.create_task(admit(worker))
        await asyncio.sleep(0.1)
        server.retire("rollout/0", 1)
        await asyncio.to_thread(learner.served, 1)
        return await asking

    with serving(buffer_config(placement=UP_TO_TWO)) as server, learner_at(server) as learner:
        with_worker(server.address, put_all)
        learner.take(0)
        learner.trained(1)
        assert with_worker(server.address, run) == []
        assert len(with_worker(server.address, admit, "rollout/1")) == 4


def test_a_buffer_that_has_started_again_takes_a_repeated_retirement(tmp_path: Path) -> None:
    config = journalled(tmp_path, placement=UP_TO_TWO)
    with serving_until_a_crash(config) as server, learner_at(server):
        running = with_worker(server.address, lambda worker: worker.admit(2))
        assert server.retire("rollout/0", 1) == 2
    with serving(config) as server:
        assert server.retire("rollout/0", 1) == 2
        assert with_worker(server.address, admit) == []
        for slot in running:
            assert with_worker(server.address, lambda worker, slot=slot: worker.put(make_group(slot)))
        assert server.retire("rollout/0", 1) == 0
        assert len(with_worker(server.address, admit, "rollout/1")) == 6


def test_lost_groups_have_ended_in_the_journal_before_the_driver_hears_of_it(tmp_path: Path) -> None:
    """Else a buffer that dies then would give the next one groups that nobody runs."""
    config = journalled(tmp_path, placement=UP_TO_TWO)
    with serving(config) as server, learner_at(server):
        with_worker(server.address, lambda worker: worker.admit(2))
        assert server.abandon("rollout/0", 2) == 2
        killed = shutil.copytree(config.run_dir, tmp_path / "killed")
    with closing(sqlite3.connect(killed / FILE_NAME)) as journal:
        assert journal.execute("SELECT COUNT(*) FROM groups WHERE state = 'running'").fetchone() == (0,)


@pytest.mark.parametrize("told", [True, False], ids=["the driver told", "the successor asked"])
def test_a_server_that_was_replaced_gets_no_slots_from_a_later_buffer(tmp_path: Path, told: bool) -> None:
    config = journalled(tmp_path, placement=UP_TO_TWO)
    with serving_until_a_crash(config) as server, learner_at(server):
        if told:
            assert server.abandon("rollout/0", 2) == 0
        else:
            with_worker(server.address, lambda worker: worker.tell_prompts([(9, 9)]), incarnation=2)
    with serving(config) as server:
        with pytest.raises(WireError, match="incarnation: got 1"):
            with_worker(server.address, admit)
        assert len(with_worker(server.address, admit, incarnation=2)) == 8


def test_the_first_slots_do_not_wait_for_a_worker_that_is_lost_before_it_asks() -> None:
    placement = {"rollout": {"servers": 2}}
    with serving(buffer_config(1, placement=placement)) as server, learner_at(server):
        assert with_worker(server.address, admit) == []
        assert server.abandon("rollout/1", 2) == 0
        assert len(with_worker(server.address, lambda worker: worker.admit(1))) == 1


def test_slots_are_granted_once_as_many_workers_as_the_minimum_have_asked() -> None:
    async def three(address: str) -> list[int]:
        workers = [WorkerClient(address, f"rollout/{index}", TIMEOUTS) for index in range(3)]
        early = asyncio.create_task(workers[2].admit(100))
        await asyncio.sleep(0.1)
        assert not early.done()
        granted = await asyncio.gather(early, workers[0].admit(100))
        for slot in granted[0][:2]:
            await workers[2].put(make_group(slot))
        for slot in granted[1]:
            await workers[0].put(make_group(slot))
        await asyncio.to_thread(learner.take, 0)
        await asyncio.to_thread(learner.trained, 1)
        await asyncio.to_thread(learner.served, 1)
        late = await workers[1].admit(100)
        for worker in workers:
            await worker.close()
        return [*map(len, granted), len(late)]

    placement = {"rollout": {"servers": {"min": 2, "max": 3}}}
    with serving(buffer_config(prompts_per_step=4, placement=placement)) as server, learner_at(server) as learner:
        assert asyncio.run(three(server.address)) == [2, 2, 4]
