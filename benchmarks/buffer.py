"""Rollout groups a second through the buffer on loopback, as a share of what bare ZMQ moves.

    python -m benchmarks.buffer                            # prints the table
    python -m benchmarks.buffer --out benchmarks/results/buffer.md
    python -m benchmarks.buffer --profile                  # where the buffer's process spends its time

Each row is measured `--rounds` times in turn, medians count. Nothing is generated or trained. CPU is that of all
processes of the row together, and tells more than the rate on a machine that others use, too.
    bare        PUSH to PULL, the same bytes, producer and consumer in a process each
    forwarded   the same, with a process between that does nothing but pass the frames on: the bytes cross two sockets,
                as they do through a buffer, which can't be faster
    buffer      a producer of made groups, buffer and consumer in a process each: slots, checks, acknowledgements
    journal     the same, journal on
    clients     as `buffer`, with the clients of a run: every group is encoded, sent from asyncio, and decoded again
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import dataclasses
import io
import multiprocessing
import pstats
import statistics
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

from async_rl.config import (
    AlgorithmConfig,
    BufferConfig,
    CheckpointConfig,
    Config,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    StalenessConfig,
    TaskConfig,
)
from async_rl.errors import WaitTimeoutError
from async_rl.messages.codec import encode_group
from async_rl.types import Rollout, RolloutGroup, Slot
from benchmarks.machine import describe_machine
from buffer.client import LearnerClient, WorkerClient
from buffer.frames import receive
from buffer.protocol.wire import pack_request, read_reply, read_slots
from buffer.server import BufferServer

Figures = tuple[float, ...]
"""Groups a second; CPU microseconds a group of the producer, of what is between, and of the consumer."""
WAIT_S = 30.0
"""Of every single wait in here."""
WARMUP_STEPS = 5
WORKER = "rollout/0"
FIRST = Slot(group_id=0, prompt_index=0, start_version=0)
SIZED = Slot(group_id=2**32 - 1, prompt_index=2**32 - 1, start_version=0)
"""Its ids take four bytes each, as many as any other's of a benchmark."""


def make_group(config: Config, slot: Slot) -> RolloutGroup:
    length = config.rollout.max_response_tokens
    rollout = Rollout(
        tokens=np.arange(length, dtype=np.int32),
        logprobs=np.full(length, -0.5, np.float32),
        versions=np.full(length, slot.start_version, np.int32),
        mask=np.ones(length, np.bool_),
        reward=1.0,
        finish_reason="stop",
    )
    return RolloutGroup(
        group_id=slot.group_id, prompt_index=slot.prompt_index, start_version=slot.start_version, temperature=1.0,
        prompt_tokens=np.arange(128, dtype=np.int32), rollouts=(rollout,) * config.rollout.group_size,
        duration_s=1.0, worker=WORKER,
    )


class MadeGroups:
    """Encoded groups without the encoding: one for each start version, into which the ids of the slot are written."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._made: dict[int, bytearray] = {}

    def encoded(self, slot: Slot) -> bytearray:
        """Good until the next call."""
        data = self._made.get(slot.start_version)
        if data is None:
            like = dataclasses.replace(SIZED, start_version=slot.start_version)
            data = self._made[slot.start_version] = bytearray(encode_group(make_group(self._config, like)))
            self._offsets = [data.index(name) + len(name) + 1 for name in (b"group_id", b"prompt_index")]
        for offset, value in zip(self._offsets, (slot.group_id, slot.prompt_index), strict=True):
            struct.pack_into(">I", data, offset, value)
        return data


def run_buffer(config: Config, pipe: Connection, profile: bool) -> None:
    server = BufferServer(config)
    pipe.send(server.address)
    stop = threading.Event()
    profiler = cProfile.Profile()
    serve = partial(profiler.runcall, server.serve, stop) if profile else partial(server.serve, stop)
    serving = threading.Thread(target=serve)
    serving.start()
    pipe.poll(None)
    stop.set()
    serving.join(WAIT_S)
    server.close()
    text = io.StringIO()
    if profile:
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(22)
    pipe.send(text.getvalue())


def run_made_producer(config: Config, address: str) -> None:
    """Sends groups for all slots it gets, and asks for more, whatever is acknowledged."""
    groups = MadeGroups(config)
    ids = iter(range(1, 2**40))
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = round(1000 * WAIT_S)
        socket.connect(address)

        def admit() -> int:
            socket.send(pack_request("admit", number := next(ids), worker=WORKER, max_groups=1000, wait_s=5.0))
            return number

        asked = admit()
        while True:
            reply = read_reply(receive(socket))
            if asked in reply.ids:
                for slot in read_slots(reply.result):
                    socket.send(pack_request("put", next(ids), worker=WORKER), zmq.SNDMORE)
                    socket.send(groups.encoded(slot))
                asked = admit()


def run_client_producer(config: Config, address: str) -> None:
    """Does what a rollout worker does with a finished group."""

    async def run() -> None:
        client = WorkerClient(address, WORKER, config.timeouts)
        tasks: set[asyncio.Task[Any]] = set()
        while True:
            for slot in await client.admit(config.max_slots):
                tasks.add(task := asyncio.create_task(client.put(make_group(config, slot))))
                task.add_done_callback(tasks.discard)

    asyncio.run(run())


def through_buffer(
    config: Config, steps: int, producer: Callable[[Config, str], None], decode: bool, profile: bool = False
) -> tuple[Figures, str]:
    """After the warm-up; with the profile of the buffer's process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    buffer = context.Process(target=run_buffer, args=(config, theirs, profile), daemon=True)
    buffer.start()
    address = received(ours, "the buffer's address")
    producing = context.Process(target=producer, args=(config, address), daemon=True)
    producing.start()
    learner = LearnerClient(address, config.timeouts)
    learner.served(0)
    processes = [psutil.Process(pid) for pid in (producing.pid, buffer.pid, None)]
    start_s, cpu_s = 0.0, [0.0]
    for version in range(WARMUP_STEPS + steps):
        if version == WARMUP_STEPS:
            start_s, cpu_s = time.monotonic(), used_s(processes)
        if decode:
            learner.take(version)
        else:
            learner.take_raw(version)
        learner.trained(version + 1)
        learner.served(version + 1)
    figures = per_group(steps * config.learner.prompts_per_step, start_s, used_s(processes), cpu_s)
    learner.close()
    producing.terminate()
    producing.join(WAIT_S)
    ours.send("stop")
    text = received(ours, "the buffer's end")
    buffer.join(WAIT_S)
    return figures, text


def used_s(processes: list[psutil.Process]) -> list[float]:
    times = [process.cpu_times() for process in processes]
    return [used.user + used.system for used in times]


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


def bare(config: Config, steps: int, forwarded: bool = False) -> Figures:
    """From PUSH to PULL, after the warm-up."""
    data = encode_group(make_group(config, FIRST))
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
    """Medians of each way."""
    rates: dict[str, list[Figures]] = {"bare": [], "forwarded": [], "buffer": [], "journal": [], "clients": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            rates["bare"].append(bare(config, 4 * steps))
            rates["forwarded"].append(bare(config, 2 * steps, forwarded=True))
            rates["buffer"].append(through_buffer(config, steps, run_made_producer, decode=False)[0])
            journalled = with_journal(config, folder, number)
            rates["journal"].append(through_buffer(journalled, steps, run_made_producer, decode=False)[0])
            rates["clients"].append(through_buffer(config, steps, run_client_producer, decode=True)[0])
    return {way: tuple(map(statistics.median, zip(*figures, strict=True))) for way, figures in rates.items()}


def table(figures: dict[str, Figures], size: int) -> Iterator[str]:
    yield "| way | groups/s | MB/s | of bare | CPU, us a group | producer + between + consumer | bare's CPU of it |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    bare_rate, *bare_cpu = figures["bare"]
    for way, (rate, *cpu) in figures.items():
        speed = f"{rate:,.0f} | {rate * size / 1e6:,.0f} | {rate / bare_rate:.2f}"
        parts = " + ".join(f"{part:.0f}" for part in cpu)
        yield f"| {way} | {speed} | {sum(cpu):.0f} | {parts} | {sum(bare_cpu) / sum(cpu):.2f} |"


def profiles(config: Config, steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for way, of_way in (("buffer", config), ("journal", with_journal(config, folder, 0))):
            (rate, *_), text = through_buffer(of_way, steps, run_made_producer, decode=False, profile=True)
            print(f"{way}: {rate:.0f} groups/s under the profiler\n{text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of every response")
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the table there, too")
    parser.add_argument("--profile", action="store_true", help="show where the buffer's process spends its time")
    arguments = parser.parse_args()
    config = Config(
        model=ModelConfig(path="none"),
        task=TaskConfig(name="reasoning_gym/chain_sum"),
        rollout=RolloutConfig(group_size=arguments.group_size, max_response_tokens=arguments.tokens),
        staleness=StalenessConfig(max=arguments.staleness),
        algorithm=AlgorithmConfig(filter_zero_variance=False),
        buffer=BufferConfig(journal=False),
        learner=LearnerConfig(prompts_per_step=arguments.prompts_per_step, max_tokens_per_microbatch=2**20),
    )
    if arguments.profile:
        profiles(config, arguments.steps)
        return
    size = len(encode_group(make_group(config, FIRST)))
    lines = [*table(measured(config, arguments.steps, arguments.rounds), size)]
    title = f"Groups of {arguments.group_size} x {arguments.tokens} tokens, {size} bytes, {arguments.rounds} rounds"
    machine = describe_machine()
    where = ", ".join(machine[key] for key in ("processor", "system", "commit")) + f", {machine['cores']} cores"
    text = "\n".join([f"{title}. {where}.", "", *lines]) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
