"""Measures how long a server stands still for a push, with and without weight_sync.staging, while it samples.

    python -m benchmarks.staged_push --engine sglang --size 0.1b --rounds 5      # 0.5 GB in float32 on a CPU

Pushes with each value of weight_sync.staging take turns on one server, which a few requests keep busy. The pause is the
time in which the server samples nothing; the push is the time from the first gather until it samples with the new
weights. The table has the medians over the rounds after the first. Its tokens per second are those of replies that came
to their end during all these pushes, over the time that the pushes took, and the same without any push. Replies have
different lengths, so that they don't end together. On GPUs learner and server need one each (nccl); on a CPU it is
gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.config import Config, ModelConfig, RolloutConfig, RunConfig, TaskConfig, WeightSyncConfig
from async_rl.driver.entering import use_huge_pages
from async_rl.sweeps.machine import describe_machine, machine_text
from async_rl.sweeps.tables import Table, write_page
from async_rl.types import Prompt
from async_rl.weights import open_publisher
from async_rl.weights.base import serving_dtype
from async_rl.weights.push_report import PushReport
from benchmarks.random_model import SIZES, save_random_model
from buffer.protocol.keys import own_keys
from rollout_server.engines.base import Engine, GenerationRequest, open_engine

RESULTS = Path(__file__).parent / "results" / "staged_push"
MB = 2**20
PROMPT_TOKENS, REPLY_TOKENS = 64, 16
"""The tokens of a prompt, and the least of a reply; the most are one less than twice as many."""
STRIDE = 7
"""Replies that follow one another have lengths that differ by so much, modulo REPLY_TOKENS."""
WARM_S, CALM_S = 10.0, 20.0
"""The times before tokens are counted, and for which they are counted without a push."""


class SteadyRequests:
    """Keeps `count` requests running at an engine, and notes when tokens were sampled."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._sampled: list[tuple[float, int]] = []
        """(time at which a reply was complete, its tokens)."""
        self.tasks = [asyncio.create_task(self._ask(number)) for number in range(count)]

    async def _ask(self, number: int) -> None:
        tokens = np.arange(100 + number, 100 + number + PROMPT_TOKENS, dtype=np.int32)
        prompt = Prompt(index=number, tokens=tokens, text="", question=None)
        group_id = number
        while True:
            group_id += len(self.tasks)
            (reply,) = await self._engine.generate(GenerationRequest(
                group_id=group_id, prompt=prompt, start_version=0, seed=group_id, n=1, temperature=1.0,
                max_tokens=REPLY_TOKENS + group_id * STRIDE % REPLY_TOKENS,
            ))  # fmt: skip
            self._sampled.append((time.monotonic(), len(reply.tokens)))

    def tokens_per_s(self, spans: Sequence[tuple[float, float]]) -> float:
        """Return the tokens of replies that were complete in these times, (begin, end), over their sum."""
        tokens = sum(count for at_s, count in self._sampled if any(begin <= at_s < end for begin, end in spans))
        return tokens / sum(end - begin for begin, end in spans)


async def measure(base: Config, engine: Engine, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for generation without a push and for each value of weight_sync.staging."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(base.model.path, dtype=serving_dtype(base, device.type))
    model.to(device)  # type: ignore[arg-type]
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    transport = "nccl" if device.type == "cuda" else "gloo"
    load = SteadyRequests(engine, arguments.requests)
    await asyncio.sleep(WARM_S)
    begin_s = time.monotonic()
    await asyncio.sleep(CALM_S)
    calm = load.tokens_per_s([(begin_s, time.monotonic())])
    rows: list[dict[str, Any]] = [{"staging": "no push", "tokens_per_s": calm}]
    versions = iter(range(1, 10_000))
    reports: dict[str, list[PushReport]] = {staging: [] for staging in arguments.staging.split(",")}
    spans: dict[str, list[tuple[float, float]]] = {staging: [] for staging in reports}
    for _ in range(arguments.rounds + 1):
        for staging, found in reports.items():
            sync = WeightSyncConfig(
                transport=transport, bucket_bytes=arguments.bucket_mb * MB,
                staging=staging,  # type: ignore[arg-type]
            )
            publisher = open_publisher(dataclasses.replace(base, weight_sync=sync), [engine.url], 0, device)
            await asyncio.to_thread(publisher.connect)
            begin_s = time.monotonic()
            found.append(await asyncio.to_thread(publisher.push, tensors.items(), next(versions)))
            spans[staging].append((begin_s, time.monotonic()))
            await asyncio.to_thread(publisher.close)
    for task in load.tasks:
        task.cancel()
    for staging, found in reports.items():
        rows.append({
            "staging": staging, "megabytes": found[0].num_bytes / MB,
            "pause_ms": 1e3 * statistics.median(report.pause_s for report in found[1:]),
            "push_ms": 1e3 * statistics.median(report.seconds for report in found[1:]),
            "tokens_per_s": load.tokens_per_s(spans[staging][1:]),
        })  # fmt: skip
    return rows


async def run(base: Config, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    engine = open_engine(base, 0, arguments.out.with_name(f"{arguments.out.name}-server"))
    try:
        await engine.start()
        return await measure(base, engine, arguments)
    finally:
        await engine.aclose()


def table(rows: list[dict[str, Any]]) -> Table:
    def cell(row: dict[str, Any], key: str) -> str:
        return f"{row[key]:.0f}" if key in row else "-"

    keys = ("megabytes", "pause_ms", "push_ms", "tokens_per_s")
    header = ("weight_sync.staging", "MB", "pause, ms", "push, ms", "tokens/s meanwhile")
    return Table(header, [[row["staging"], *(cell(row, key) for key in keys)] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="sglang", choices=["sglang", "vllm", "hf"])
    parser.add_argument("--size", default="0.1b", choices=list(SIZES), help="of the random model")
    parser.add_argument("--staging", default="none,device,host", help="values of weight_sync.staging; hf has no host")
    parser.add_argument("--requests", type=int, default=4, help="requests that run at once")
    parser.add_argument("--bucket-mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="writes OUT.md and OUT.json")
    arguments = parser.parse_args()
    use_huge_pages()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(arguments.size, Path(folder))
        base = Config(
            model=ModelConfig(path=folder), run=RunConfig(dir=folder), task=TaskConfig(name="reasoning_gym/chain_sum"),
            rollout=RolloutConfig(engine=arguments.engine, mem_fraction=0.3, max_response_tokens=2 * REPLY_TOKENS),
        )  # fmt: skip
        with own_keys(base, Path(folder) / "keys") as base:
            rows = asyncio.run(run(base, arguments))
    command = f"`python -m benchmarks.staged_push {' '.join(sys.argv[1:])}`"
    load = f"load average {os.getloadavg()[0]:.1f} at the end"
    page = f"{command}, {machine_text()}, {load}. Medians of the rounds after the first.\n\n"
    write_page(arguments.out, page + table(rows).markdown(), {"machine": describe_machine(), "rows": rows})


if __name__ == "__main__":
    main()
