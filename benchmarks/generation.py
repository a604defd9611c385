"""Measures episodes per second through the pipeline, beside plain HTTP requests of the same prompts to the same server.

    python -m benchmarks.generation configs/quickstart.yaml --groups 1024 --rounds 3
    python -m benchmarks.generation configs/sweep_gpu.yaml --random 0.1b --sglang-bench rollout.max_response_tokens=256

Plain requests are as many at once as the pipeline keeps in flight, and only the JSON of their replies is parsed. The
pipeline is the rollout worker with parsing, rewards and the ZMQ buffer, and a consumer that trains nothing. Plain and
pipeline take turns on one server; the printed ratio is pipeline over plain, of the medians. With --sglang-bench,
SGLang's own serving benchmark sends as many requests, each of the longest prompt and answer and no prompt twice.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from async_rl.base.config import Config, RunConfig, StalenessConfig
from async_rl.base.config.loading import load_config
from async_rl.base.config.resolve import resolve
from async_rl.base.errors import AsyncRLError
from async_rl.base.models_and_data.fetching import located, pinned
from async_rl.base.models_and_data.model_folder import end_tokens, load_tokenizer
from async_rl.base.network import api_key, authorization
from async_rl.base.types import Batch
from async_rl.tools.sweeps.machine import describe_machine
from benchmarks.random_model import SIZES, save_random_model
from buffer.client import LearnerClient
from buffer.keys import own_keys
from buffer.server import BufferServer
from rollout_server.engines.base import Engine, GenerationRequest, open_engine
from rollout_server.engines.http_admin import HttpAdmin
from rollout_server.engines.http_engine import OpenReply
from rollout_server.engines.sglang.engine import request_body
from rollout_server.rewards.scoring import open_rewards
from rollout_server.tasks.base import Task, open_task
from rollout_server.worker.worker import ScoredPlayer, Worker

CACHE_KEYS = itertools.count()


Rates = tuple[float, float]
"""Episodes per second, and tokens per second."""


async def plain_load(config: Config, engine: Engine, task: Task, groups: int) -> Rates:
    """Send `groups` plain HTTP requests of group_size samples to the server; return (episodes/s, tokens/s)."""
    rollout = config.rollout
    ends = end_tokens(config.model.path)
    gate = asyncio.Semaphore(rollout.max_groups_in_flight)

    async def one(session: aiohttp.ClientSession, index: int) -> int:
        request = GenerationRequest(
            group_id=index, prompt=task.prompt(index), start_version=0, seed=0, n=rollout.group_size,
            max_tokens=rollout.max_response_tokens, temperature=rollout.temperature, top_p=rollout.top_p,
        )
        body = request_body(request, [OpenReply()], ends, "", 0) | {"extra_key": f"plain-{next(CACHE_KEYS)}"}
        body["sampling_params"][0]["n"] = request.n
        del body["rid"]  # the server gives the samples ids itself
        async with gate, session.post(f"{engine.url}/generate", json=body) as reply:
            answers = await reply.json()
            assert len(answers) == rollout.group_size
            return sum(len(answer["output_ids"]) for answer in answers)

    headers = authorization(config.network)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
        start_s = time.monotonic()
        tokens = await asyncio.gather(*(one(session, i) for i in range(groups)))
        seconds = time.monotonic() - start_s
        return groups * rollout.group_size / seconds, sum(tokens) / seconds


@dataclass(frozen=True, slots=True)
class Rolled:
    """The batches that a worker has rolled out, in the order in which they were ready."""

    batches: list[Batch]
    taken_s: list[float]
    """When each was taken, counted from the start of the worker."""


async def roll_out(config: Config, engine: Engine, task: Task, batches: int) -> Rolled:
    """Run worker and buffer until a consumer, which trains nothing, has taken `batches` batches; return those."""
    await asyncio.to_thread(HttpAdmin(config, engine.url).flush_when_idle)  # earlier groups had the same numbers
    config = dataclasses.replace(config, staleness=StalenessConfig(max=batches - 1))  # gives slots for all
    config = dataclasses.replace(config, buffer=dataclasses.replace(config.buffer, journal=False))  # no run directory
    server = BufferServer(config)
    stop = threading.Event()
    serving = threading.Thread(target=server.serve, args=(stop,), daemon=True)
    serving.start()
    tokenizer = load_tokenizer(config.model.path)
    player = ScoredPlayer(config, 0, engine, task, open_rewards(config, task), tokenizer)
    worker = Worker(config, player, server.address)

    def consume() -> Rolled:
        client = LearnerClient(server.address, config.timeouts, config.network.keys)
        client.served(0)
        rolled = Rolled([], [])
        for version in range(batches):
            rolled.batches.append(client.take(version))
            rolled.taken_s.append(time.monotonic() - start_s)
            client.trained(version + 1)  # never served: the engine stays at version 0, and no further slot opens
        client.close()
        return rolled

    async def produce() -> None:
        async for _ in worker.run():
            pass

    start_s = time.monotonic()
    producing = asyncio.create_task(produce())
    consuming = asyncio.create_task(asyncio.to_thread(consume))
    await asyncio.wait((consuming, producing), return_when=asyncio.FIRST_COMPLETED)
    if producing.done():
        producing.result()  # raises the error that ended the worker; without a worker the consumer would time out
    rolled = await consuming
    await worker.stop()
    await producing
    stop.set()
    serving.join(config.timeouts.shutdown_s)
    server.close()
    return rolled


async def pipeline_load(config: Config, engine: Engine, task: Task, groups: int) -> Rates:
    """Roll out `groups` groups through the pipeline; return (episodes/s, tokens/s)."""
    rolled = await roll_out(config, engine, task, groups // config.learner.prompts_per_step)
    tokens = sum(group.num_tokens for batch in rolled.batches for group in batch.groups)
    return groups * config.rollout.group_size / rolled.taken_s[-1], tokens / rolled.taken_s[-1]


SGLANG_BENCH = """from rollout_server.engines.sglang import import_stubs; import_stubs.install()
from sglang.benchmark.serving import cli_main; cli_main()"""


def sglang_bench(config: Config, engine: Engine, groups: int) -> float:
    """Run SGLang's own benchmark on the server and return its tokens/s; as many answers, as many at once as plain_load.
    """
    rollout = config.rollout
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as result:
        done = subprocess.run(
            [
                sys.executable, "-c", SGLANG_BENCH, "--backend", "sglang", "--base-url", engine.url,
                "--model", config.model.path, "--dataset-name", "random-ids", "--tokenize-prompt",
                "--random-input-len", str(config.task.max_prompt_tokens),
                "--random-output-len", str(rollout.max_response_tokens), "--random-range-ratio", "1.0",
                "--num-prompts", str(groups * rollout.group_size), "--return-logprob", "--temperature", "1.0",
                "--max-concurrency", str(rollout.max_groups_in_flight * rollout.group_size),
                "--output-file", result.name, "--disable-tqdm", "--disable-stream",  # the pipeline streams none either
            ],
            capture_output=True, text=True, timeout=config.timeouts.generate_s,
            env=os.environ | {"OPENAI_API_KEY": api_key(config.network)},
        )  # fmt: skip
        if done.returncode:
            raise AsyncRLError(f"SGLang's benchmark ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
        return float(json.loads(Path(result.name).read_text().splitlines()[-1])["output_throughput"])


async def measure(
    config: Config, groups: int, rounds: int, with_sglang_bench: bool, logs: Path
) -> dict[str, list[float]]:
    """Start a server and run all rounds; return, by load (plain, pipeline, ...), a list of its rates, one per round.

    Keys that end with `_tokens` have tokens/s, the others episodes/s.
    """
    engine = open_engine(config, 0, logs)
    rates: dict[str, list[float]] = {}
    try:
        await engine.start()
        task = open_task(config, load_tokenizer(config.model.path))
        await plain_load(config, engine, task, groups)  # warm-up
        gc.collect()
        gc.freeze()  # as the rollout process of a run does
        for number in range(rounds):
            found: dict[str, float] = {}
            found["plain"], found["plain_tokens"] = await plain_load(config, engine, task, groups)
            found["pipeline"], found["pipeline_tokens"] = await pipeline_load(config, engine, task, groups)
            if with_sglang_bench:
                found["sglang_bench_tokens"] = await asyncio.to_thread(sglang_bench, config, engine, groups)
            for key, rate in found.items():
                rates.setdefault(key, []).append(rate)
            values = ", ".join(f"{key} {rate:.1f}" for key, rate in found.items())
            print(f"round {number + 1}/{rounds}, per second: {values}", flush=True)
        return rates
    finally:
        await engine.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--groups", type=int, default=1024, help="a multiple of learner.prompts_per_step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--random", choices=list(SIZES), help="a model of random weights in place of the config's")
    parser.add_argument("--sglang-bench", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("runs/generation.json"))
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.random:
            save_random_model(arguments.random, Path(folder))
            arguments.overrides += [f"model.path={folder}"]
        config = located(pinned(load_config(arguments.config, arguments.overrides)))
        config = dataclasses.replace(config, run=RunConfig(name="generation"))
        if arguments.groups % config.learner.prompts_per_step:
            parser.error(f"--groups must be a multiple of learner.prompts_per_step={config.learner.prompts_per_step}")
        logs = arguments.out.with_name(f"{arguments.out.stem}-server")
        with own_keys(config, Path(folder) / "keys") as keys:
            config = resolve(config, keys)
            rates = asyncio.run(measure(config, arguments.groups, arguments.rounds, arguments.sglang_bench, logs))
    medians = {key: statistics.median(series) for key, series in rates.items()}
    ratios = {"ratio": medians["pipeline"] / medians["plain"]}
    if arguments.sglang_bench:
        ratios["ratio_to_sglang_bench"] = medians["pipeline_tokens"] / medians["sglang_bench_tokens"]
    texts = ", ".join(f"{key} {value:.3f}" for key, value in ratios.items())
    print(f"\nplain {medians['plain']:.1f} episodes/s, pipeline {medians['pipeline']:.1f} episodes/s, {texts}")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": describe_machine(), **rates, **ratios}, indent=2) + "\n")


if __name__ == "__main__":
    main()
