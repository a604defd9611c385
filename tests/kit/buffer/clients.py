"""Clients of a buffer: one message, one worker, or all of a run."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgpack
import numpy as np
import zmq

from async_rl.base.config import Config, TimeoutsConfig
from async_rl.base.messages.codec import encode_group
from async_rl.base.types import Batch, Group, Slot
from buffer.client import LearnerClient, WorkerClient
from buffer.server import BufferServer
from buffer.wire import decode_batch, pack_request
from tests.kit.groups import make_group, make_row

TIMEOUTS = TimeoutsConfig(buffer_s=5.0, batch_s=20.0)
QUICK = dataclasses.replace(TIMEOUTS, buffer_s=1.0)
FIRST = Slot(group_id=0, prompt_index=0, start_version=0)


def with_worker(
    address: str,
    use: Callable[[WorkerClient], Coroutine[Any, Any, Any]],
    name: str = "rollout/0",
    timeouts: TimeoutsConfig = TIMEOUTS,
    keys: str = "",
    incarnation: int = 1,
) -> Any:
    async def run() -> Any:
        client = WorkerClient(address, name, timeouts, keys, incarnation)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(run())


@contextmanager
def learner_at(server: BufferServer, version: int = 0, timeouts: TimeoutsConfig = TIMEOUTS) -> Iterator[LearnerClient]:
    """A learner that serves a version."""
    client = LearnerClient(server.address, timeouts)
    try:
        client.served(version)
        yield client
    finally:
        client.close()


async def put_all(worker: WorkerClient) -> None:
    for slot in await worker.admit(100):
        await worker.put(make_group(slot))


GroupMaker = Callable[[Slot, np.random.Generator, int], Group]
"""Makes a group for a slot, with token versions from the slot's up to the given one."""


def make_answers(slot: Slot, rng: np.random.Generator, newest: int, group_size: int = 2) -> Group:
    versions = np.array([slot.start_version, newest], np.int32)
    return make_group(slot, rows=tuple(make_row(2, versions=versions) for _ in range(group_size)))


async def admit_until(stop: threading.Event, client: WorkerClient) -> list[Slot]:
    """Return the slots that one request brings; none if `stop` is set before the buffer ends its long poll."""
    admission = asyncio.create_task(client.admit(10))
    while not (admission.done() or stop.is_set()):
        await asyncio.wait({admission}, timeout=0.05)
    if admission.done():
        return admission.result()
    admission.cancel()
    return []


def run_pipeline(
    server: BufferServer | str, config: Config, steps: int, workers: int, step_s: float = 0.005,
    make: GroupMaker | None = None,
) -> list[Batch]:
    """A learner in this thread, workers with random durations in another; returns what was trained on.

    Args:
        server: the buffer; or only its address, if it may be killed meanwhile, so that an answer may get lost.
        make: makes the groups; by default each has answers of two tokens to a question.
    """
    make_one = make or partial(make_answers, group_size=config.rollout.group_size)
    address = server if isinstance(server, str) else server.address
    stop = threading.Event()
    announced = [0]

    async def one_worker(index: int) -> None:
        rng = np.random.default_rng(index)
        client = WorkerClient(address, f"rollout/{index}", config.timeouts)

        async def one_group(slot: Slot) -> None:
            await asyncio.sleep(float(rng.exponential(0.005)))
            if rng.random() < 0.1:
                await client.fail(slot.group_id, "drawn", requeue=bool(rng.random() < 0.5))
                return
            stored = await client.put(make_one(slot, rng, announced[0]))
            assert stored or address is server

        running: set[asyncio.Task[None]] = set()
        while not stop.is_set():
            for slot in await admit_until(stop, client):
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
    learner = LearnerClient(address, config.timeouts)
    learner.served(0)
    batches = []
    try:
        for version in range(steps):
            batches.append(decode_batch(learner.take_raw(version)))
            time.sleep(step_s)
            learner.trained(version + 1)
            announced[0] = version + 1
            learner.served(version + 1)
    finally:
        stop.set()
        producing.join()
        learner.close()
    return batches


def ask(address: str, frames: list[bytes], wait_s: float = 5.0) -> dict[str, Any]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send_multipart(frames)
        assert socket.poll(round(1000 * wait_s)), "no answer"
        reply: dict[str, Any] = msgpack.unpackb(socket.recv_multipart()[0])
        return reply


def put_frames(slot: Slot, worker: str = "rollout/0", **changes: Any) -> list[bytes]:
    header = pack_request("put", 77, worker=worker, incarnation=1, group_id=slot.group_id)
    return [header, encode_group(make_group(slot, **changes))]
