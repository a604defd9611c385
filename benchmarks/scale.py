"""Measures what the pipeline itself costs at scale: buffer, workers and driver, with engines that only sleep.

    python -m benchmarks.scale                                  # about 10 minutes
    python -m benchmarks.scale --out benchmarks/results/scale   # also writes the page and its figures

Groups take random times (exponential, GROUP_S), after which the engine returns answers of fixed length. Workers,
buffer, journal and the driver's log are those of a run; the learner takes each batch, trains on nothing, and serves the
next version, as fast as it can. Then, for the time of a hand-out, it asks for some batches only when they are surely
ready. One of workers, groups in flight and length of answers is varied at a time. CPU times are those of whole
processes, ZMQ's threads in them; the workers share two processes, and their reports reach the driver through pipes, not
through Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import psutil

from async_rl.base.config import Config
from async_rl.base.config.loading import load_config
from async_rl.base.messages.reports import StepDone
from async_rl.base.telemetry.timeline import Span
from async_rl.run.log.run_log import RunLog
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.buffer import received, run_buffer
from benchmarks.page import machine_text, write_page
from buffer.client import LearnerClient
from rollout_server.engines.base import GenerationRequest, Load, SampledReply

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
GROUP_SIZE, BOUND, HOSTS = 4, 3, 2
GROUP_S = 0.1
WARM_UP_STEPS = 3
HANDOUTS = 3
"""The batches that are asked for when they are ready."""


@dataclass(frozen=True, slots=True)
class ScaleCell:
    """The sizes that are varied: rollout workers, groups in flight or waiting, and tokens of an answer."""

    workers: int = 8
    groups: int = 1024
    tokens: int = 500

    @property
    def batch(self) -> int:
        return self.groups // (BOUND + 1)


@dataclass(frozen=True, slots=True)
class CellFigures:
    """The costs of one cell."""

    groups_per_s: float
    buffer_us: float
    """CPU time a group of the buffer's process, in microseconds; likewise the next two."""
    workers_us: float
    driver_us: float
    buffer_mib: float
    handout_ms: float
    """The time from the learner's request for a batch that is ready to its last byte, in the median."""


CELLS = (
    *(ScaleCell(workers=number) for number in (1, 4, 16, 64)),
    *(ScaleCell(groups=number, tokens=100) for number in (64, 256, 1024, 4096, 16_384)),
    *(ScaleCell(groups=256, tokens=number) for number in (100, 1000, 8000, 32_000)),
)


class SleepingEngine:
    """Answers each request with the same tokens, after a random time."""

    url = ""

    def __init__(self, tokens: int, vocab_size: int, seed: int) -> None:
        self.vocab_size = vocab_size
        self._tokens = np.full(tokens, 7, np.int32)
        self._logprobs = np.full(tokens, -0.5, np.float32)
        self._rng = np.random.default_rng(seed)

    async def start(self) -> None: ...

    async def aclose(self) -> None: ...

    async def load(self) -> Load:
        return Load(running=1, slots=1)

    async def generate(self, request: GenerationRequest) -> list[SampledReply]:
        await asyncio.sleep(float(self._rng.exponential(GROUP_S)))
        versions = np.full(len(self._tokens), request.start_version, np.int32)
        reply = SampledReply(
            tokens=self._tokens, logprobs=self._logprobs, versions=versions, finish_reason="length"
        )
        return [reply] * request.n


def configured(cell: ScaleCell, folder: str) -> Config:
    return load_config(str(CONFIG), [
        f"run.dir={folder}", "run.name=scale", "run.steps=1000000", "eval.num_prompts=0", f"staleness.max={BOUND}",
        f"learner.prompts_per_step={cell.batch}", f"rollout.group_size={GROUP_SIZE}",
        f"rollout.max_response_tokens={cell.tokens}", f"rollout.max_groups_in_flight={-(-cell.groups // cell.workers)}",
        f"placement.rollout.servers={cell.workers}", "algorithm.filter_zero_variance=false", "logging.wandb=disabled",
        "checkpoint.every_steps=0", "buffer.journal_keep_steps=0", "timeouts.batch_s=600",
        f"learner.max_tokens_per_microbatch={GROUP_SIZE * (cell.tokens + 1000)}",
    ])  # fmt: skip


def run_workers(config: Config, cell: ScaleCell, indices: Sequence[int], address: str, pipe: Connection) -> None:
    """Run some of the rollout workers, and send their reports through the pipe, until the process is ended."""
    # Here, because the driver's process would import transformers as well, which it needs no more than a run's.
    from learner.models.tiny_model import character_tokenizer
    from rollout_server.rewards.contract import Reward
    from rollout_server.rewards.scoring import NamedReward
    from rollout_server.tasks.base import open_task
    from rollout_server.worker.worker import ScoredPlayer, Worker

    tokenizer = character_tokenizer()
    task = open_task(config, tokenizer)
    reward = NamedReward(reward=Reward(function=lambda question, answer: 1.0), timeout_s=config.timeouts.reward_s)

    async def run(index: int) -> None:
        engine = SleepingEngine(cell.tokens, len(tokenizer), index)
        player = ScoredPlayer(config, index, engine, task, [reward], tokenizer)
        async for report in Worker(config, player, address).run():
            pipe.send((f"rollout/{index}", report))

    async def run_all() -> None:
        await asyncio.gather(*map(run, indices))

    asyncio.run(run_all())


def run_driver(config: Config, pipes: Sequence[Connection]) -> None:
    """Log all reports that come through the pipes, as the driver does, until the process is ended."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        log = RunLog(config)
        while True:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                log.add(*pipe.recv())


def measure(cell: ScaleCell, seconds: float) -> CellFigures:
    """Run a cell for at least `seconds` and three steps after its warm-up."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config = configured(cell, folder)
        config.run_dir.mkdir(parents=True)
        spawned = multiprocessing.get_context("spawn")

        def start(*arguments: object) -> BaseProcess:
            process = spawned.Process(target=arguments[0], args=arguments[1:], daemon=True)  # type: ignore[arg-type]
            process.start()
            stack.callback(process.join, 10)
            stack.callback(process.terminate)
            return process

        ours, theirs = spawned.Pipe()
        buffer = start(run_buffer, config, theirs)
        address = received(ours, "the buffer's address")
        ends = [spawned.Pipe(duplex=False) for _ in range(min(HOSTS, cell.workers) + 1)]
        driver = start(run_driver, config, [reader for reader, _ in ends])
        hosts = [
            start(run_workers, config, cell, range(i, cell.workers, HOSTS), address, ends[i][1])
            for i in range(min(HOSTS, cell.workers))
        ]
        return learn(config, cell, seconds, address, [[buffer], hosts, [driver]], ends[-1][1])


def learn(
    config: Config, cell: ScaleCell, seconds: float, address: str, processes: Sequence[Sequence[BaseProcess]],
    reports: Connection,
) -> CellFigures:
    """Take batches as a learner does, and return what they cost the processes of buffer, workers and driver."""
    client = LearnerClient(address, config.timeouts, config.network.keys)
    client.served(0)
    watched = [[psutil.Process(process.pid) for process in each] for each in processes]
    version = 0

    def step() -> float:
        """Take a batch and serve the next version; return how long the buffer took."""
        nonlocal version
        asked_s = time.monotonic()
        client.take_raw(version, threading.Event().is_set)
        taken_s = time.monotonic()
        version += 1
        client.trained(version)
        client.served(version)
        span = Span("learner/0", "busy", asked_s, time.monotonic(), "update")
        reports.send(("learner/0", StepDone(version=version, spans=(span,))))
        return taken_s - asked_s

    for _ in range(WARM_UP_STEPS):
        step()
    begun_s, before, first = time.monotonic(), list(map(cpu_s, watched)), version
    while version < first + 3 or time.monotonic() - begun_s < seconds:
        step()
    groups = (version - first) * cell.batch
    rate = groups / (time.monotonic() - begun_s)
    buffer_us, workers_us, driver_us = (
        1e6 * (now - then) / groups for now, then in zip(map(cpu_s, watched), before, strict=True)
    )
    memory_mib = watched[0][0].memory_info().rss / 2**20
    handouts_s = []
    for _ in range(HANDOUTS):
        time.sleep(0.5 + 2 * cell.batch / rate)
        handouts_s.append(step())
    client.close()
    return CellFigures(
        rate, buffer_us, workers_us, driver_us, memory_mib, 1e3 * statistics.median(handouts_s)
    )


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def table(found: Sequence[tuple[ScaleCell, CellFigures]]) -> Table:
    header = (
        "workers", "groups in flight", "tokens an answer", "groups/s", "CPU, us a group: buffer", "workers", "driver",
        "buffer, MiB", "hand-out, ms",
    )
    rows = [
        [
            f"{cell.workers}", f"{cell.groups:,}", f"{cell.tokens:,}", f"{f.groups_per_s:.0f}", f"{f.buffer_us:.0f}",
            f"{f.workers_us:.0f}", f"{f.driver_us:.0f}", f"{f.buffer_mib:.0f}", f"{f.handout_ms:.1f}",
        ]
        for cell, f in found
    ]
    return Table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="at least so long for each cell, after its warm-up")
    parser.add_argument("--cells", type=int, nargs="*", help="the numbers of the cells to measure, from 0")
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    arguments = parser.parse_args()
    chosen = [CELLS[i] for i in arguments.cells] if arguments.cells else CELLS
    found = []
    for number, cell in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {cell}", file=sys.stderr, flush=True)
        found.append((cell, measure(cell, arguments.seconds)))
    text = (
        f"Groups of {GROUP_SIZE} answers, staleness.max {BOUND}, a batch of a quarter of the groups, with journal. "
        f"{machine_text()}.\n\n{table(found).markdown()}\n"
    )
    print(text)
    if arguments.out:
        figures = [asdict(cell) | asdict(measured) for cell, measured in found]
        write_page(arguments.out, text, {"machine": describe_machine(), "cells": figures})


if __name__ == "__main__":
    main()
