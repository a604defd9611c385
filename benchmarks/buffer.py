"""Rollout groups a second through the buffer on loopback: encode, put, check, hand out, decode.

    python -m benchmarks.buffer --group-size 8 --tokens 512

Buffer, worker and learner are processes of their own, as in a run; nothing is generated or trained.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from async_rl.codec import encode_group
from async_rl.config import (
    Config,
    LearnerConfig,
    ModelConfig,
    RolloutConfig,
    StalenessConfig,
    TaskConfig,
)
from async_rl.types import Rollout, RolloutGroup, Slot
from buffer.client import LearnerClient, WorkerClient
from buffer.server import BufferServer

WARMUP_STEPS = 5


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
        duration_s=1.0, worker="rollout/0",
    )


def run_buffer(config: Config, pipe: Connection) -> None:
    server = BufferServer(config)
    pipe.send(server.address)
    stop = threading.Event()
    serving = threading.Thread(target=server.serve, args=(stop,))
    serving.start()
    pipe.recv()
    stop.set()
    serving.join()
    server.close()


def run_worker(config: Config, address: str) -> None:
    async def run() -> None:
        client = WorkerClient(address, "rollout/0", config.timeouts)
        tasks: set[asyncio.Task[Any]] = set()
        while True:
            for slot in await client.admit(config.max_slots):
                tasks.add(task := asyncio.create_task(client.put(make_group(config, slot))))
                task.add_done_callback(tasks.discard)

    asyncio.run(run())


def groups_per_second(config: Config, steps: int) -> float:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    buffer = context.Process(target=run_buffer, args=(config, theirs))
    buffer.start()
    address = ours.recv()
    worker = context.Process(target=run_worker, args=(config, address), daemon=True)
    worker.start()
    learner = LearnerClient(address, config.timeouts)
    learner.served(0)
    start_s = 0.0
    for version in range(WARMUP_STEPS + steps):
        if version == WARMUP_STEPS:
            start_s = time.monotonic()
        learner.take(version)
        learner.trained(version + 1)
        learner.served(version + 1)
    seconds = time.monotonic() - start_s
    learner.close()
    worker.terminate()
    worker.join()
    ours.send("stop")
    buffer.join()
    return steps * config.learner.prompts_per_step / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of every response")
    parser.add_argument("--prompts-per-step", type=int, default=64)
    parser.add_argument("--staleness", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    config = Config(
        model=ModelConfig(path="none"),
        task=TaskConfig(name="reasoning_gym/chain_sum"),
        rollout=RolloutConfig(group_size=arguments.group_size, max_response_tokens=arguments.tokens),
        staleness=StalenessConfig(max=arguments.staleness),
        learner=LearnerConfig(prompts_per_step=arguments.prompts_per_step),
    )
    rate = groups_per_second(config, arguments.steps)
    size = len(encode_group(make_group(config, Slot(group_id=0, prompt_index=0, start_version=0))))
    tokens = rate * arguments.group_size * arguments.tokens
    print(f"{rate:.0f} groups/s of {size} bytes: {tokens / 1e6:.2f} M tokens/s, {rate * size / 1e6:.0f} MB/s")


if __name__ == "__main__":
    main()
