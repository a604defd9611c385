"""Measures how many groups per second pass through the buffer on loopback, beside plain ZMQ.

    python -m benchmarks.buffer                            # prints the table
    python -m benchmarks.buffer --out benchmarks/results/buffer.md

The rows are measured in turn, `--rounds` times, and the table has their medians. Nothing is generated or trained. CPU
time is that of all processes of a row together; on a machine that has other work it says more than the rate.
    plain       ZMQ PUSH to PULL with the same bytes, producer and consumer in a process each
    forwarded   as `plain`, with a process between that only passes the frames on. The bytes cross two sockets, as they
                do in a buffer, so a buffer can't be faster
    buffer      a producer of encoded groups, buffer and consumer in a process each: slots, checks, acknowledgements
    journal     as `buffer`, with the journal
    clients     as `buffer`, with the clients of a run: every group is encoded, sent from asyncio, and decoded again
    keys        as `clients`, encrypted with keys such as a run makes for itself
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import multiprocessing
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

from async_rl.base.config import BufferConfig, CheckpointConfig, Config, RunConfig
from async_rl.base.config.loading import load_config
from async_rl.base.config.resolve import resolve
from async_rl.base.errors import WaitTimeoutError
from async_rl.base.messages.codec import encode_group
from async_rl.base.types import Group, Row, Slot
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text
from buffer.client import LearnerClient, WorkerClient
from buffer.keys import own_keys
from buffer.server import BufferServer
from buffer.wire import pack_request, read_reply, read_slots, receive

Figures = tuple[float, ...]
"""Groups per second; CPU microseconds per group of the producer, of the process between, and of the consumer."""
WAIT_S = 30.0
"""The time limit of each wait for another process."""
WARMUP_STEPS = 5
WORKER = "rollout/0"
SLOT = Slot(group_id=2**32 - 1, prompt_index=2**32 - 1, start_version=0)
"""A slot whose ids take four bytes each when they are encoded, so that other ids can be written over them."""


def make_group(config: Config, slot: Slot) -> Group:
    length = config.rollout.max_response_tokens
    row = Row(
        tokens=np.arange(length, dtype=np.int32),
        logprobs=np.full(length, -0.5, np.float32),
        versions=np.full(length, slot.start_version, np.int32),
        mask=np.ones(length, np.bool_),
        reward=1.0,
        finish_reason="stop",
    )
    return Group(
        group_id=slot.group_id, prompt_index=slot.prompt_index, start_version=slot.start_version, temperature=1.0,
        prompt_tokens=np.arange(128, dtype=np.int32), rows=(row,) * config.rollout.group_size,
        duration_s=1.0, worker=WORKER,
    )


class EncodedGroups:
    """Makes encoded groups for slots fast: encodes one for each start version, then only replaces the ids in it."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._encoded: dict[int, bytearray] = {}

    def encoded(self, slot: Slot) -> bytearray:
        """Return the bytes of a group for this slot. They are valid until the next call."""
        data = self._encoded.get(slot.start_version)
        if data is None:
            like = dataclasses.replace(SLOT, start_version=slot.start_version)
            data = self._encoded[slot.start_version] = bytearray(encode_group(make_group(self._config, like)))
            self._offsets = [data.index(name) + len(name) + 1 for name in (b"group_id", b"prompt_index")]
        for offset, value in zip(self._offsets, (slot.group_id, slot.prompt_index), strict=True):
            struct.pack_into(">I", data, offset, value)
        return data


def run_buffer(config: Config, pipe: Connection) -> None:
    """Serve a buffer: send its address through the pipe, and end when the pipe has a message.

    It runs in a process of its own.
    """
    server = BufferServer(config)
    pipe.send(server.address)
    stop = threading.Event()
    serving = threading.Thread(target=server.serve, args=(stop,))
    serving.start()
    pipe.poll(None)
    stop.set()
    serving.join(WAIT_S)
    server.close()


def run_encoded_producer(config: Config, address: str) -> None:
    """Send an already encoded group for each granted slot, without acknowledgements, until the process is ended.

    It runs in a process of its own.
    """
    groups = EncodedGroups(config)
    ids = iter(range(1, 2**40))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = round(1000 * WAIT_S)
        socket.connect(address)

        def admit() -> int:
            number = next(ids)
            socket.send(pack_request("admit", number, worker=WORKER, incarnation=1, max_groups=1000, wait_s=5.0))
            return number

        asked = admit()
        while True:
            reply = read_reply(receive(socket))
            if asked in reply.ids:
                for slot in read_slots(reply.result):
                    of_group = {"worker": WORKER, "incarnation": 1, "group_id": slot.group_id}
                    socket.send(pack_request("put", next(ids), **of_group), zmq.SNDMORE)
                    socket.send(groups.encoded(slot))
                asked = admit()


def run_client_producer(config: Config, address: str) -> None:
    """Make and send a group for each granted slot with a WorkerClient, which encodes it, until the process is ended.

    It runs in a process of its own.
    """

    async def run() -> None:
        client = WorkerClient(address, WORKER, config.timeouts, config.network.keys)
        tasks: set[asyncio.Task[Any]] = set()
        while True:
            for slot in await client.admit(config.slots):
                tasks.add(task := asyncio.create_task(client.put(make_group(config, slot))))
                task.add_done_callback(tasks.discard)

    asyncio.run(run())


def through_buffer(
    config: Config, steps: int, producer: Callable[[Config, str], None] = run_encoded_producer, decode: bool = False
) -> Figures:
    """Return groups/s and CPU times of `steps` batches sent through a buffer; with `decode` the consumer decodes them.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    buffer = context.Process(target=run_buffer, args=(config, theirs), daemon=True)
    buffer.start()
    address = received(ours, "the buffer's address")
    producing = context.Process(target=producer, args=(config, address), daemon=True)
    producing.start()
    learner = LearnerClient(address, config.timeouts, config.network.keys)
    learner.served(0)
    processes = [psutil.Process(pid) for pid in (producing.pid, buffer.pid, None)]
    start_s, cpu_s = 0.0, [0.0]
    for version in range(WARMUP_STEPS + steps):
        if version == WARMUP_STEPS:
            start_s, cpu_s = time.monotonic(), used_s(processes)
        take = learner.take if decode else learner.take_raw
        take(version)
        learner.trained(version + 1)
        learner.served(version + 1)
    figures = per_group(steps * config.learner.prompts_per_step, start_s, used_s(processes), cpu_s)
    learner.close()
    producing.terminate()
    producing.join(WAIT_S)
    ours.send("stop")
    buffer.join(WAIT_S)
    return figures


def used_s(processes: list[psutil.Process]) -> list[float]:
    return [sum(process.cpu_times()[:2]) for process in processes]


def per_group(number: int, start_s: float, used: list[float], used_before: list[float]) -> Figures:
    rate = number / (time.monotonic() - start_s)
    return rate, *(1e6 * (after - before) / number for after, before in zip(used, used_before, strict=True))


def run_pusher(address: str, data: bytes, number: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = socket.sndtimeo = round(1000 * WAIT_S)
        socket.connect(address)
        for _ in range(number):
            socket.send(data, copy=False)


def run_forwarder(target: str, pipe: Connection, number: int) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as front, context.socket(zmq.PUSH) as back:
        back.linger = back.sndtimeo = front.rcvtimeo = round(1000 * WAIT_S)
        back.connect(target)
        pipe.send(f"tcp://127.0.0.1:{front.bind_to_random_port('tcp://127.0.0.1')}")
        for _ in range(number):
            back.send(front.recv(copy=False), copy=False)


def plain(config: Config, steps: int, forwarded: bool = False) -> Figures:
    """Return groups/s and CPU times from a ZMQ PUSH to a PULL socket; if `forwarded`, through a process in between."""
    data = encode_group(make_group(config, SLOT))
    size = config.learner.prompts_per_step
    number, warm_up = (WARMUP_STEPS + steps) * size, WARMUP_STEPS * size
    spawned = multiprocessing.get_context("spawn")
    workers: list[SpawnProcess] = []
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.linger, socket.rcvtimeo = 0, round(1000 * WAIT_S)
        address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        if forwarded:
            ours, theirs = spawned.Pipe()
            workers.append(spawned.Process(target=run_forwarder, args=(address, theirs, number), daemon=True))
            workers[0].start()
            address = received(ours, "the forwarder's address")
        workers.append(spawned.Process(target=run_pusher, args=(address, data, number), daemon=True))
        workers[-1].start()
        processes = [*(psutil.Process(worker.pid) for worker in reversed(workers)), psutil.Process()]
        start_s, cpu_s = 0.0, [0.0]
        for i in range(number):
            if i == warm_up:
                start_s, cpu_s = time.monotonic(), used_s(processes)
            socket.recv()
        rate, producer, *between, consumer = per_group(number - warm_up, start_s, used_s(processes), cpu_s)
        for worker in workers:
            worker.join(WAIT_S)
    return rate, producer, sum(between), consumer


def received(pipe: Connection, what: str) -> Any:
    if not pipe.poll(WAIT_S):
        raise WaitTimeoutError(f"the benchmark waited {WAIT_S:.0f} s for {what}")
    return pipe.recv()


def with_journal(config: Config, folder: str, number: int) -> Config:
    run = RunConfig(name=f"round-{number}", dir=folder)
    buffer = BufferConfig(journal=True, journal_keep_steps=2)
    return dataclasses.replace(config, run=run, buffer=buffer, checkpoint=CheckpointConfig(every_steps=0))


def measured(config: Config, steps: int, rounds: int) -> dict[str, Figures]:
    rows = ("plain", "forwarded", "buffer", "journal", "clients", "keys")
    figures: dict[str, list[Figures]] = {row: [] for row in rows}
    with tempfile.TemporaryDirectory() as folder, own_keys(config, Path(folder) / "keys") as keys:
        with_keys = resolve(config, keys)
        for number in range(rounds):
            figures["plain"].append(plain(config, 4 * steps))
            figures["forwarded"].append(plain(config, 2 * steps, forwarded=True))
            figures["buffer"].append(through_buffer(config, steps))
            figures["journal"].append(through_buffer(with_journal(config, folder, number), steps))
            figures["clients"].append(through_buffer(config, steps, run_client_producer, decode=True))
            figures["keys"].append(through_buffer(with_keys, steps, run_client_producer, decode=True))
    return {row: tuple(map(statistics.median, zip(*measured, strict=True))) for row, measured in figures.items()}


def table(figures: dict[str, Figures], size: int) -> Table:
    """Return the table of rates and CPU times, one line for each measured row; `plain` is what they are compared with.

    Args:
        size: bytes of a group.
    """
    header = (
        "row", "groups/s", "MB/s", "of plain", "CPU, us a group", "producer + between + consumer", "plain's CPU of it"
    )  # fmt: skip
    plain_rate, *plain_cpu = figures["plain"]
    lines = [
        [
            row, f"{rate:,.0f}", f"{rate * size / 1e6:,.0f}", f"{rate / plain_rate:.2f}", f"{sum(cpu):.0f}",
            " + ".join(f"{part:.0f}" for part in cpu), f"{sum(plain_cpu) / sum(cpu):.2f}",
        ]
        for row, (rate, *cpu) in figures.items()
    ]  # fmt: skip
    return Table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of every response")
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    arguments = parser.parse_args()
    config = load_config(None, [
        "model.path=none", "task.name=reasoning_gym/chain_sum", "algorithm.filter_zero_variance=false",
        "buffer.journal=false", f"rollout.group_size={arguments.group_size}", f"staleness.max={arguments.staleness}",
        f"rollout.max_response_tokens={arguments.tokens}", f"learner.prompts_per_step={arguments.prompts_per_step}",
        f"learner.max_tokens_per_microbatch={2**20}",
    ])  # fmt: skip
    size = len(encode_group(make_group(config, SLOT)))
    rows = table(measured(config, arguments.steps, arguments.rounds), size)
    title = f"Groups of {arguments.group_size} x {arguments.tokens} tokens, {size} bytes, {arguments.rounds} rounds"
    text = f"{title}. {machine_text()}.\n\n{rows.markdown()}"
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
