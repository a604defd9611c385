from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import pytest
import zmq

from buffer.client import LearnerClient, WorkerClient
from buffer.operations import Operations, Outgoing
from buffer.server import BufferServer
from buffer.staleness import Rules
from buffer.store import Store
from buffer.wire import pack_request, read_reply
from tests.kit.buffer.clients import FIRST, QUICK, put_all, put_frames, with_worker
from tests.kit.configs import buffer_config
from tests.kit.groups import make_group

pytestmark = pytest.mark.processes  # together they compute for long


class LossyLink:
    """A proxy between one client and the buffer that loses the first `lost` replies."""

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


def test_a_client_that_reads_nothing_loses_only_replies_of_its_own(
    buffer: BufferServer, learner: LearnerClient
) -> None:
    number = 60_000  # more replies than the buffers of a TCP connection hold
    with zmq.Context() as context, context.socket(zmq.DEALER) as deaf:
        deaf.linger, deaf.rcvhwm, deaf.sndhwm, deaf.rcvbuf = 0, 1, 0, 4096
        deaf.connect(buffer.address)
        for request_id in range(1, number + 1):
            deaf.send(pack_request("admit", request_id, worker="w" * 300, incarnation=1, max_groups=1, wait_s=0))
        deadline_s = time.monotonic() + 60
        while buffer.counters()["buffer/refused"] < number and time.monotonic() < deadline_s:
            time.sleep(0.05)
        with_worker(buffer.address, put_all)  # others notice nothing
        assert len(learner.take(0).groups) == 4
        received = 0
        while deaf.poll(1000):
            deaf.recv()
            received += 1
        assert 0 < received < number
        repetition = pack_request("served", number + 1, version=0)
        deaf.send(repetition)  # it is answered
        assert deaf.poll(10_000)
        assert read_reply([zmq.Frame(deaf.recv())]).ids == [number + 1]


def test_a_repeated_take_that_is_read_together_with_trained_is_forgotten() -> None:
    """The learner repeats a `take`, then gets the first answer. The buffer reads both later requests in one turn."""
    config = buffer_config(max_staleness=1)
    operations = Operations(config, Store(Rules.from_config(config)))

    def answers(*messages: list[bytes]) -> list[Outgoing]:
        for message in messages:
            operations.handle(b"client", message)
        return operations.replies(0.0)

    answers([pack_request("served", 1, version=0)])
    answers([pack_request("admit", 2, worker="rollout/0", incarnation=1, max_groups=4, wait_s=0.0)])
    answers(*(put_frames(dataclasses.replace(FIRST, group_id=i, prompt_index=i)) for i in range(4)))
    take = [pack_request("take", 3, version=0, wait_s=0.0)]
    assert [reply.ids for reply in answers(take)] == [[3]]
    later = answers(take, [pack_request("trained", 4, version=1)])
    assert [(reply.ids, reply.error) for reply in later] == [([4], "")]
