"""Mutated messages, given to the operations and sent over a socket: each is refused or valid."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable

import msgpack
import numpy as np
import pytest
import zmq

from async_rl.base.messages.codec import encode_group
from async_rl.base.types import Slot
from buffer.operations import Operations
from buffer.staleness import Rules
from buffer.store import Store
from buffer.wire import pack_request
from tests.kit.buffer.clients import FIRST, put_frames, run_pipeline
from tests.kit.buffer.serving import serving
from tests.kit.configs import buffer_config, changed
from tests.kit.random_episodes import random_episodes

pytestmark = pytest.mark.processes  # together they compute for long

TO_THE_OPERATIONS, WITH_EPISODES, OVER_A_SOCKET = 40_000, 15_000, 5_000
FAR = 0x1111_1111_1111_1111
"""No five mutations make a small number of it."""
FAILED = {"incarnation": 1, "cause": "no cause", "requeue": True, "data_row": 0}


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


def put_episodes(slot: Slot) -> list[bytes]:
    group = random_episodes(slot, np.random.default_rng(slot.group_id))
    header = pack_request("put", 77, worker="rollout/0", incarnation=1, group_id=slot.group_id)
    return [header, encode_group(group)]


def valid_messages(put: Callable[[Slot], list[bytes]]) -> list[list[bytes]]:
    worker = "rollout/0"
    return [
        *(put(dataclasses.replace(FIRST, group_id=i, prompt_index=i)) for i in range(4)),
        [pack_request("fail", 5, worker=worker, group_id=2, **FAILED)],
        [pack_request("admit", 5, worker=worker, incarnation=1, max_groups=3, wait_s=0.0)],
        [pack_request("take", 5, version=0, wait_s=0.0)],
        [pack_request("served", 5, version=0)],
        [pack_request("trained", 5, version=1)],
    ]


@pytest.mark.parametrize(
    ("env", "put", "number"), [("", put_frames, TO_THE_OPERATIONS), ("my_games:Game", put_episodes, WITH_EPISODES)]
)
def test_mutated_messages_of_a_worker_are_refused_or_valid(
    env: str, put: Callable[[Slot], list[bytes]], number: int
) -> None:
    """The messages are those of a worker that has slots, so some are still valid and change the state."""
    rng = random.Random(1)
    originals = valid_messages(put)
    replies = refusals = admitted = 0
    config = buffer_config(max_staleness=1)
    config = changed(config, task={"env": env})
    for seed in range(10):
        store = Store(Rules.from_config(config))
        operations = Operations(config, store)
        for frames in [[pack_request("served", 1, version=0)], originals[5]]:
            operations.handle(b"worker", frames)
        operations.replies(0.0)  # grants the slots
        rng.seed(seed)
        for _ in range(number // 10):
            operations.handle(b"worker", mutate(rng.choice(originals), rng))
            for reply in operations.replies(0.0):
                replies += len(reply.ids)
                refusals += bool(reply.error)
        admitted += int(operations.counters()["buffer/admitted"])
        assert operations.counters()["buffer/refused"] > 0.5 * number // 10
        store.close()  # checks the accounting
    assert refusals < replies <= number + 10, "some were valid"
    assert admitted >= 10 * 3


def test_mutated_messages_do_not_disturb_a_run() -> None:
    """The client that sends them is no worker of the run, so none of them can be valid."""
    rng = random.Random(0)
    originals = [
        put_frames(dataclasses.replace(FIRST, group_id=FAR), worker="rubbish"),
        [pack_request("fail", 5, worker="rubbish", group_id=FAR, **FAILED)],
        [pack_request("admit", 5, worker="rubbish", incarnation=1, max_groups=5, wait_s=0.0)],
        [pack_request("take", 5, version=FAR, wait_s=0.0)],
        [pack_request("served", 5, version=FAR)],
        [pack_request("trained", 5, version=FAR)],
    ]
    steps = 20

    def send_rubbish(address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 5000)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.connect(address)
            for _ in range(OVER_A_SOCKET):
                socket.send_multipart(mutate(rng.choice(originals), rng) or [b""])
            socket.send_multipart([pack_request("fail", FAR, worker="rubbish", group_id=-1, **FAILED)])
            last = None
            while last != FAR:
                assert socket.poll(10_000), "the buffer stopped answering"
                last = msgpack.unpackb(socket.recv_multipart()[0])["ids"][-1]

    with serving(buffer_config(max_staleness=1)) as server:
        peer = threading.Thread(target=send_rubbish, args=(server.address,))
        peer.start()
        trained = run_pipeline(server, buffer_config(max_staleness=1), steps=steps, workers=1)
        peer.join()
        assert [batch.version for batch in trained] == list(range(steps))
        assert server.counters()["buffer/refused"] >= OVER_A_SOCKET
