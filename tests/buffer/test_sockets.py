"""Real sockets: one buffer, its two kinds of clients, and peers that send rubbish."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from async_rl.codec import encode_group
from async_rl.config import Config, TimeoutsConfig
from async_rl.errors import AsyncRLError, WaitTimeoutError, WireError
from async_rl.types import Batch, Slot
from buffer.client import LearnerClient, WorkerClient
from buffer.server import BufferServer, fair_shares
from buffer.wire import decode_batch, pack_request
from tests.buffer.made import make_config, make_group, make_rollout, serving

TIMEOUTS = TimeoutsConfig(wire_s=5.0, batch_s=20.0)


def with_worker(
    address: str, use: Callable[[WorkerClient], Coroutine[Any, Any, Any]], name: str = "rollout/0",
    timeouts: TimeoutsConfig = TIMEOUTS,
) -> Any:
    async def run() -> Any:
        client = WorkerClient(address, name, timeouts)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


@pytest.fixture
def buffer() -> Iterator[BufferServer]:
    with serving(make_config(max_staleness=0, prompts_per_step=4)) as server:
        yield server


@pytest.fixture
def learner(buffer: BufferServer) -> Iterator[LearnerClient]:
    client = LearnerClient(buffer.address, TIMEOUTS)
    client.served(0)
    yield client
    client.close()


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
        assert batch.groups[1].rollouts[1].tokens.tolist() == [0, 1, 2, 3]
        assert batch.counters["buffer/held"] == 4 and batch.counters["buffer/slots_held"] == 4
        learner.trained(version + 1)
        learner.served(version + 1)
    assert buffer.counters()["buffer/trained"] == 12


def test_slots_freed_together_are_granted_in_one_answer(buffer: BufferServer, learner: LearnerClient) -> None:
    async def run(worker: WorkerClient) -> tuple[list[Slot], list[Slot]]:
        first = await worker.admit(100)
        for slot in first:
            await worker.put(make_group(slot))
        parked = asyncio.create_task(worker.admit(100))
        await asyncio.to_thread(learner.take, 0)
        await asyncio.to_thread(learner.trained, 1)
        assert not parked.done()
        await asyncio.to_thread(learner.served, 1)
        return first, await parked

    first, second = with_worker(buffer.address, run)
    assert [slot.group_id for slot in first + second] == list(range(8))
    assert {slot.start_version for slot in second} == {1}


def test_admission_waits_for_every_worker_and_shares_evenly() -> None:
    async def both(address: str) -> list[list[Slot]]:
        workers = [WorkerClient(address, f"rollout/{i}", TIMEOUTS) for i in range(2)]
        early = asyncio.create_task(workers[0].admit(100))
        await asyncio.sleep(0.05)
        assert not early.done()
        slots = await asyncio.gather(early, workers[1].admit(100))
        for worker in workers:
            await worker.close()
        return slots

    with serving(make_config(max_staleness=1, prompts_per_step=4, workers=2)) as server:
        learner = LearnerClient(server.address, TIMEOUTS)
        learner.served(0)
        assert [len(slots) for slots in asyncio.run(both(server.address))] == [4, 4]
        learner.close()


def test_shares_fill_up_whoever_has_the_fewest_running() -> None:
    assert fair_shares(8, {"a": 100, "b": 100}, {}) == {"a": 4, "b": 4}
    assert fair_shares(8, {"a": 100, "b": 100}, {"a": 6}) == {"a": 1, "b": 7}
    assert fair_shares(8, {"a": 2, "b": 100}, {"b": 6}) == {"a": 2, "b": 6}
    assert fair_shares(8, {"a": 1, "b": 2}, {}) == {"a": 1, "b": 2}
    assert fair_shares(3, {"b": 9, "a": 9}, {}) == {"b": 2, "a": 1}


class LossyLink:
    """Between one client and the buffer; swallows the first `lost` replies."""

    def __init__(self, address: str, lost: int) -> None:
        self.lost = lost
        self.requests = 0
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._back = self._context.socket(zmq.DEALER)
        self.address = f"tcp://127.0.0.1:{self._front.bind_to_random_port('tcp://127.0.0.1')}"
        self._back.connect(address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._front, zmq.POLLIN)
        poller.register(self._back, zmq.POLLIN)
        identity = b""
        while not self._stop.is_set():
            ready = dict(poller.poll(20))
            if self._front in ready:
                identity, *frames = self._front.recv_multipart()
                self.requests += 1
                self._back.send_multipart(frames)
            if self._back in ready:
                frames = self._back.recv_multipart()
                if self.lost:
                    self.lost -= 1
                else:
                    self._front.send_multipart([identity, *frames])

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._context.destroy(linger=0)


@pytest.fixture
def lossy(buffer: BufferServer) -> Iterator[LossyLink]:
    link = LossyLink(buffer.address, lost=1)
    yield link
    link.close()


QUICK = dataclasses.replace(TIMEOUTS, wire_s=1.0)


def test_a_group_whose_acknowledgement_is_lost_is_stored_once(
    buffer: BufferServer, learner: LearnerClient, lossy: LossyLink
) -> None:
    lossy.lost = 0

    async def run(worker: WorkerClient) -> list[bool]:
        slots = await worker.admit(4)
        lossy.lost = 1
        stored = [await worker.put(make_group(slots[0]))]
        return [*stored, await worker.put(make_group(slots[1])), await worker.put(make_group(slots[1]))]

    # The answer to the repeated request says that it was there already; so does the one to the repeated call.
    assert with_worker(lossy.address, run, timeouts=QUICK) == [False, True, False]
    counters = buffer.counters()
    assert (counters["buffer/depth"], counters["buffer/running"], counters["buffer/refused"]) == (2, 2, 0)
    assert lossy.requests == 5


def test_slots_whose_answer_is_lost_are_granted_once(
    buffer: BufferServer, learner: LearnerClient, lossy: LossyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.2)
    slots = with_worker(lossy.address, lambda worker: worker.admit(3), timeouts=QUICK)
    assert [slot.group_id for slot in slots] == [0, 1, 2]
    assert buffer.counters()["buffer/admitted"] == 3


def test_a_batch_whose_answer_is_lost_is_handed_out_again(
    buffer: BufferServer, learner: LearnerClient, lossy: LossyLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.2)
    with_worker(buffer.address, put_all)
    remote = LearnerClient(lossy.address, QUICK)
    assert len(remote.take(0).groups) == 4
    lossy.lost = 1
    remote.trained(1)
    lossy.lost = 1
    remote.served(1)
    remote.close()
    assert (buffer.counters()["buffer/trained"], buffer.counters()["buffer/slots_held"]) == (4, 0)


async def put_all(worker: WorkerClient) -> None:
    for slot in await worker.admit(100):
        await worker.put(make_group(slot))


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


def test_a_failed_or_abandoned_group_is_granted_to_another_worker(
    buffer: BufferServer, learner: LearnerClient
) -> None:
    async def fail_one(worker: WorkerClient) -> None:
        slots = await worker.admit(4)
        await worker.fail(slots[1].group_id, "engine restarted", requeue=True)
        await worker.fail(slots[1].group_id, "engine restarted", requeue=True)
        await worker.put(make_group(slots[0]))

    with_worker(buffer.address, fail_one)
    assert buffer.abandon("rollout/0") == 2
    slots = with_worker(buffer.address, lambda worker: worker.admit(9), name="rollout/1")
    assert [(slot.group_id, slot.prompt_index) for slot in slots] == [(4, 1), (5, 2), (6, 3)]
    late = Slot(group_id=2, prompt_index=2, start_version=0)
    assert with_worker(buffer.address, lambda worker: worker.put(make_group(late))) is False
    assert buffer.counters()["buffer/dropped_failed"] == 3


def test_the_learner_says_what_it_waited_for(buffer: BufferServer) -> None:
    learner = LearnerClient(buffer.address, dataclasses.replace(TIMEOUTS, batch_s=0.1))
    with pytest.raises(WaitTimeoutError, match=r"learner waited 0 s for batch 0: 1 of 1 rollout workers have not asked"):
        learner.take(0)
    learner.served(0)
    with_worker(buffer.address, lambda worker: worker.admit(3))
    expected = (
        r"^learner waited 0 s for batch 0: 0 of 4 groups finished, 3 running \(oldest 0 s, worker rollout/0\), "
        r"served version 0$"
    )
    with pytest.raises(WaitTimeoutError, match=expected):
        learner.take(0)
    learner.close()


def test_a_buffer_that_does_not_answer_is_named() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as mute:
        address = f"tcp://127.0.0.1:{mute.bind_to_random_port('tcp://127.0.0.1')}"
        slow = dataclasses.replace(TIMEOUTS, wire_s=0.2)
        learner = LearnerClient(address, slow)
        with pytest.raises(WaitTimeoutError, match=rf"learner waited 0 s .* for the buffer at {address} to answer `tra"):
            learner.trained(1)
        learner.close()
        group = make_group(Slot(group_id=12, prompt_index=0, start_version=0))
        with pytest.raises(WaitTimeoutError, match=r"rollout/0 waited 0 s .* to answer `put` \(group 12\), sent 4 times"):
            with_worker(address, lambda worker: worker.put(group), timeouts=slow)


def test_an_admit_without_capacity_returns_empty(buffer: BufferServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.05)
    assert with_worker(buffer.address, lambda worker: worker.admit(4)) == []


def test_a_closed_client_ends_its_waits_with_an_error(buffer: BufferServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.05)

    async def run() -> None:
        worker = WorkerClient(buffer.address, "rollout/0", QUICK)
        waiting = asyncio.create_task(worker.admit(4))
        await asyncio.sleep(0)
        await worker.close()
        with pytest.raises(AsyncRLError, match="rollout/0: the connection was closed before the answer to admit"):
            await waiting

    asyncio.run(run())


def test_close_drops_the_rest_as_shutdown_and_waits_for_serve() -> None:
    server = BufferServer(make_config(shutdown_s=0.1))
    stop = threading.Event()
    thread = threading.Thread(target=server.serve, args=(stop,))
    thread.start()
    learner = LearnerClient(server.address, TIMEOUTS)
    learner.served(0)
    learner.close()
    with_worker(server.address, lambda worker: worker.admit(4))
    with pytest.raises(WaitTimeoutError, match="buffer: close waited 0 s"):
        server.close()
    stop.set()
    thread.join()
    assert server.close()["buffer/dropped_shutdown"] == 4


def ask(address: str, frames: list[bytes]) -> dict[str, Any]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart(frames)
        assert socket.poll(5000), "no answer"
        reply: dict[str, Any] = msgpack.unpackb(socket.recv_multipart()[0])
        return reply


def put_frames(slot: Slot, worker: str = "rollout/0", **changes: Any) -> list[bytes]:
    return [pack_request("put", 77, worker=worker), encode_group(make_group(slot, **changes))]


FIRST = Slot(group_id=0, prompt_index=0, start_version=0)
OTHER_PROMPT = dataclasses.replace(FIRST, prompt_index=3)
OTHER_START = dataclasses.replace(FIRST, start_version=1)
FUTURE = {"rollouts": (make_rollout(3), make_rollout(3, versions=np.array([0, 0, 1], np.int32)))}


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        ([b""], "message: 0 bytes"),
        ([b"\xc1rubbish"], "message: 8 bytes starting b'\\xc1rubbish'"),
        ([b"\x01"], "op: got 1, allowed one of admit"),
        ([pack_request("explode", 77)], "op: got 'explode', allowed one of admit, put"),
        ([pack_request("trained", 77)], "version: missing"),
        ([pack_request("trained", 77, version="1")], "version: got '1', allowed an integer"),
        ([pack_request("trained", 77, version=1)], "version: got 1, allowed the next after 0"),
        ([pack_request("served", 77, version=5)], "version: got 5, allowed 0..0 (served..trained)"),
        ([pack_request("take", 77, version=3, wait_s=0)], "version: got 3, allowed 0"),
        ([pack_request("take", 77, version=0, wait_s=-1)], "wait_s: got -1, allowed a finite number >= 0"),
        ([pack_request("admit", 77, worker="w", max_groups=0, wait_s=0)], "max_groups: got 0"),
        ([pack_request("admit", 77, worker="w" * 300, max_groups=1, wait_s=0)], "worker: got 'www"),
        ([pack_request("fail", 77, worker="rollout/0", group_id=9, cause="", requeue=False)], "group_id: got 9"),
        ([pack_request("fail", 77, worker="rollout/0", group_id=0, cause="", requeue=1)], "requeue: got 1"),
        ([pack_request("put", 77, worker="rollout/0")], "message: 1 frames, allowed 2 for put"),
        ([pack_request("put", 77, worker="rollout/0"), b"?"], "message: got 63, allowed a map"),
        ([pack_request("put", 77, worker="rollout/0"), bytes(10**5)], "group: 100000 bytes, allowed at most"),
        (put_frames(dataclasses.replace(FIRST, group_id=99)), "group_id: got 99, allowed one that was granted"),
        (put_frames(FIRST, worker="rollout/1"), "worker: got 'rollout/1', allowed 'rollout/0'"),
        (put_frames(OTHER_PROMPT), "prompt_index: got 3, allowed 0 as granted to group 0"),
        (put_frames(OTHER_START), "start_version: got 1, allowed 0 as granted to group 0"),
        (put_frames(FIRST, **FUTURE), "versions: got 1, allowed at most 0, the newest announced"),
        (put_frames(FIRST, rollouts=(make_rollout(3),)), "rollouts: got a list of 1, allowed a list of 2..2"),
    ],
)
def test_a_bad_message_is_refused_by_name_counted_and_harms_nobody(
    buffer: BufferServer, learner: LearnerClient, frames: list[bytes], message: str
) -> None:
    slots = with_worker(buffer.address, lambda worker: worker.admit(4))
    before = buffer.counters()
    reply = ask(buffer.address, frames)
    assert message in reply["error"], reply
    assert buffer.counters() == {**before, "buffer/refused": 1}

    async def put_granted(worker: WorkerClient) -> None:
        for slot in slots:
            assert await worker.put(make_group(slot))

    with_worker(buffer.address, put_granted)
    assert len(learner.take(0).groups) == 4


def test_a_refusal_reaches_the_worker_as_an_error_and_the_group_goes_on(
    buffer: BufferServer, learner: LearnerClient
) -> None:
    async def run(worker: WorkerClient) -> bool:
        slots = await worker.admit(1)
        with pytest.raises(WireError, match=r"the buffer refused a message: versions: got 1, allowed at most 0"):
            await worker.put(make_group(slots[0], **FUTURE))
        return await worker.put(make_group(slots[0]))

    assert with_worker(buffer.address, run) is True


def mutate(frames: list[bytes], rng: random.Random) -> list[bytes]:
    frames = list(frames)
    at = rng.randrange(len(frames))
    data = bytearray(frames[at])
    for _ in range(rng.randint(1, 5)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    frames[at] = bytes(data)
    if rng.random() < 0.05:
        frames = rng.choice([frames[:1], frames * 2, frames[::-1], []])
    return frames


LAST_ID = 2**40  # no few mutations lead there


def test_ten_thousand_mutated_messages_beside_a_run_leave_the_run_alone() -> None:
    """The peer that sends them is a worker without slots, so that none of them can be valid."""
    rng = random.Random(0)
    originals = [
        put_frames(dataclasses.replace(FIRST, group_id=2**40), worker="rubbish"),
        [pack_request("fail", 5, worker="rubbish", group_id=2**40, cause="no cause", requeue=True)],
        [pack_request("admit", 5, worker="rubbish", max_groups="many", wait_s=0.0)],
        [pack_request("take", 5, version=2**40, wait_s=0.0)],
        [pack_request("served", 5, version=2**40)],
        [pack_request("trained", 5, version=2**40)],
    ]
    steps = 20

    def send_rubbish(address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 5000)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(address)
            for _ in range(10_000):
                socket.send_multipart(mutate(rng.choice(originals), rng) or [b""])
            socket.send_multipart([pack_request("fail", LAST_ID, worker="rubbish", group_id=-1, cause="", requeue=False)])
            last = None
            while last != 1:
                assert socket.poll(10_000), "the buffer stopped answering"
                last = msgpack.unpackb(socket.recv_multipart()[0])["id"]

    with serving(make_config(max_staleness=1)) as server:
        peer = threading.Thread(target=send_rubbish, args=(server.address,))
        peer.start()
        trained = run_pipeline(server, make_config(max_staleness=1), steps=steps, workers=1)
        peer.join()
        assert [batch.version for batch in trained] == list(range(steps))
        assert server.counters()["buffer/refused"] >= 10_000


def run_pipeline(server: BufferServer, config: Config, steps: int, workers: int) -> list[Batch]:
    """A learner in this thread, workers with random durations in another; returns what was trained on."""
    stop = threading.Event()
    announced = [0]

    async def one_worker(index: int) -> None:
        rng = np.random.default_rng(index)
        client = WorkerClient(server.address, f"rollout/{index}", config.timeouts)

        async def one_group(slot: Slot) -> None:
            await asyncio.sleep(float(rng.exponential(0.005)))
            if rng.random() < 0.1:
                await client.fail(slot.group_id, "drawn", requeue=bool(rng.random() < 0.5))
                return
            versions = np.array([slot.start_version, announced[0]], np.int32)
            rollouts = tuple(make_rollout(2, versions=versions) for _ in range(config.rollout.group_size))
            assert await client.put(make_group(slot, rollouts=rollouts))

        running: set[asyncio.Task[None]] = set()
        while not stop.is_set():
            for slot in await client.admit(10):
                running.add(asyncio.create_task(one_group(slot)))
            done = {task for task in running if task.done()}
            running -= done
            await asyncio.gather(*done)
        await asyncio.gather(*running)
        await client.close()

    async def all_workers() -> None:
        await asyncio.gather(*(one_worker(i) for i in range(workers)))

    producing = threading.Thread(target=lambda: asyncio.run(all_workers()))
    producing.start()
    learner = LearnerClient(server.address, config.timeouts)
    learner.served(0)
    batches = []
    for version in range(steps):
        batches.append(decode_batch(learner.take_raw(version)))
        time.sleep(0.005)
        learner.trained(version + 1)
        announced[0] = version + 1
        learner.served(version + 1)
    stop.set()
    producing.join()
    learner.close()
    return batches


@pytest.mark.parametrize(("max_staleness", "workers"), [(0, 2), (1, 1), (3, 3)])
def test_over_sockets_the_bound_holds_and_every_group_is_trained_once(
    max_staleness: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffer.client.LONG_POLL_S", 0.2)
    config = make_config(max_staleness=max_staleness, prompts_per_step=8, workers=workers)
    with serving(config) as server:
        batches = run_pipeline(server, config, steps=30, workers=workers)
        counters = server.counters()
    groups = [(batch, group) for batch in batches for group in batch.groups]
    assert len({group.group_id for _, group in groups}) == len(groups) == 240
    assert max(batch.version - group.oldest_version for batch, group in groups) == max_staleness
    assert all(
        group.oldest_version <= finished <= batch.version
        for batch in batches
        for group, finished in zip(batch.groups, batch.finished_versions, strict=True)
    )
    assert counters["buffer/trained"] == 240 and counters["buffer/dropped_failed"] > 0


def test_importing_the_buffer_needs_no_heavy_library() -> None:
    import subprocess
    import sys

    code = "import sys, buffer.client, buffer.server; print([m for m in ('torch', 'ray', 'sglang') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
