"""Generation through the pipeline against a bare load of the same requests on the same server.

    python -m benchmarks.generation configs/quickstart.yaml --groups 1024 --rounds 3

Bare: plain HTTP requests, as many at once as the pipeline keeps in flight, nothing parsed but JSON. Pipeline: the
rollout worker with parsing, rewards and the ZMQ buffer, drained by a consumer that trains nothing. The two take turns
on one running server; the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

import aiohttp

from async_rl.config import Config, RunConfig, StalenessConfig
from async_rl.configfile import load_config
from async_rl.model_folder import load_tokenizer
from buffer.client import LearnerClient
from buffer.server import BufferServer
from rollout_server.engine import Engine, GenerationRequest, open_engine
from rollout_server.rewards import open_reward
from rollout_server.sglang_engine import Answer, request_body
from rollout_server.tasks import Task, open_task
from rollout_server.worker import Worker

CACHE_KEYS = itertools.count()


async def bare_seconds(config: Config, engine: Engine, task: Task, groups: int, first: int) -> float:
    """Time for `groups` requests sent straight to the server."""
    rollout = config.rollout
    eos_tokens = [load_tokenizer(config.model.path).eos_token_id]
    gate = asyncio.Semaphore(rollout.concurrency)
    async def one(session: aiohttp.ClientSession, index: int) -> None:
        request = GenerationRequest(
            group_id=index, prompt=task.prompt(index), start_version=0, seed=0, n=rollout.group_size,
            max_tokens=rollout.max_response_tokens, temperature=rollout.temperature, top_p=rollout.top_p,
        )
        body = request_body(request, [Answer()], eos_tokens, f"bare-{next(CACHE_KEYS)}.")
        body["sampling_params"][0]["n"] = request.n
        del body["rid"]  # the server names the samples itself
        async with gate, session.post(f"{engine.url}/generate", json=body) as reply:
            answers = await reply.json()
            assert len(answers) == rollout.group_size

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        start_s = time.monotonic()
        await asyncio.gather(*(one(session, first + i) for i in range(groups)))
        return time.monotonic() - start_s


async def pipeline_seconds(config: Config, engine: Engine, task: Task, groups: int) -> float:
    """Time until the consumer has taken `groups` groups from the buffer, worker and buffer running."""
    batches = groups // config.learner.prompts_per_step
    config = dataclasses.replace(config, staleness=StalenessConfig(max=batches - 1))  # just `groups` slots
    config = dataclasses.replace(config, buffer=dataclasses.replace(config.buffer, journal=False))  # no run directory
    server = BufferServer(config)
    stop = threading.Event()
    serving = threading.Thread(target=server.serve, args=(stop,), daemon=True)
    serving.start()
    tokenizer = load_tokenizer(config.model.path)
    worker = Worker(config, 0, engine, task, open_reward(config, task), tokenizer, server.address)

    def consume() -> None:
        client = LearnerClient(server.address, config.timeouts)
        client.served(0)
        for version in range(batches):
            client.take(version)
            client.trained(version + 1)  # never served: the engine stays at version 0 and admission at its cap
        client.close()

    async def produce() -> None:
        async for _ in worker.run():
            pass

    start_s = time.monotonic()
    producing = asyncio.create_task(produce())
    consuming = asyncio.create_task(asyncio.to_thread(consume))
    await asyncio.wait((consuming, producing), return_when=asyncio.FIRST_COMPLETED)
    if producing.done():
        producing.result()  # raises what ended the worker, for which the consumer would wait in vain
    await consuming
    seconds = time.monotonic() - start_s
    await worker.stop()
    await producing
    stop.set()
    serving.join(config.timeouts.shutdown_s)
    server.close()
    return seconds


async def measure(config: Config, groups: int, rounds: int) -> dict[str, list[float]]:
    """Rollouts/s of each round of both sides."""
    with tempfile.TemporaryDirectory() as logs:
        engine = open_engine(config, 0, Path(logs))
        await engine.start()
        try:
            task = open_task(config, load_tokenizer(config.model.path))
            await bare_seconds(config, engine, task, groups, first=0)  # warm-up
            rates: dict[str, list[float]] = {"bare": [], "pipeline": []}
            rollouts = groups * config.rollout.group_size
            for number in range(rounds):
                rates["bare"].append(rollouts / await bare_seconds(config, engine, task, groups, first=0))
                rates["pipeline"].append(rollouts / await pipeline_seconds(config, engine, task, groups))
                print(f"round {number + 1}/{rounds}: bare {rates['bare'][-1]:.1f} rollouts/s, "
                      f"pipeline {rates['pipeline'][-1]:.1f}", flush=True)
            return rates
        finally:
            await engine.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--groups", type=int, default=1024, help="a multiple of learner.prompts_per_step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    config = load_config(arguments.config, arguments.overrides)
    config = dataclasses.replace(config, run=RunConfig(name="generation"))
    if arguments.groups % config.learner.prompts_per_step:
        parser.error(f"--groups must be a multiple of learner.prompts_per_step={config.learner.prompts_per_step}")
    rates = asyncio.run(measure(config, arguments.groups, arguments.rounds))
    bare, pipeline = (statistics.median(rates[side]) for side in ("bare", "pipeline"))
    print(f"\nbare {bare:.1f} rollouts/s, pipeline {pipeline:.1f} rollouts/s, ratio {pipeline / bare:.3f}")
    Path("runs").mkdir(exist_ok=True)
    Path("runs/generation.json").write_text(json.dumps({**rates, "ratio": pipeline / bare}, indent=2) + "\n")


if __name__ == "__main__":
    main()
