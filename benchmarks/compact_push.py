"""Measures the bytes and the time of compact pushes (weight_sync.lora adapter, weight_sync.delta) beside whole ones.

    python -m benchmarks.compact_push --transports gloo,disk --rounds 5

Weights are random, in the shape of SmolLM2-135M by default, and in bfloat16. Before each sparse push a share of the
values moves by one unit in the last place, 0.39, 0.81, 1.8 and 4.5 % by default: what the first step at learning rates
of 1e-6 and 1e-5 changes of SmolLM2-135M itself, as loaded and spread (benchmarks.changed_shares). The server is a
process of the hf engine. The table has medians over the rounds after the first, and the time that the bytes take
between two sites at --gbit gigabits per second, which is arithmetic: 8 bits a byte, nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.config import Config, LoraConfig, ModelConfig, RolloutConfig, RunConfig, TaskConfig, WeightSyncConfig
from async_rl.sweeps.machine import describe_machine, machine_text
from async_rl.sweeps.tables import Table, write_page
from async_rl.weights import open_publisher
from async_rl.weights.push_report import PushReport
from benchmarks.random_model import SIZES, save_random_model
from learner.models.lora import AdapterParcels, add_adapters
from rollout_server.engines.hf.engine import HFEngine

RESULTS = Path(__file__).parent / "results" / "compact_push"
MB = 2**20
CPU = torch.device("cpu")
Tensors = Iterator[tuple[str, Tensor]]


def settings(path: Path, run_dir: Path, transport: str, **sync: Any) -> Config:
    rank = RANK if sync.get("lora") == "adapter" else 0
    return Config(
        model=ModelConfig(path=str(path), dtype="bfloat16", lora=LoraConfig(rank=rank)),
        task=TaskConfig(name="reasoning_gym/chain_sum"), run=RunConfig(dir=str(run_dir)),
        rollout=RolloutConfig(engine="hf"),
        weight_sync=WeightSyncConfig(transport=transport, bucket_bytes=64 * MB, **sync),
    )


RANK = 16
"""The rank of the adapters, which are in all linear layers."""


async def serve(path: Path, run_dir: Path) -> None:
    """Serve the hf engine's endpoints, print their URL, and end with stdin."""
    engine = HFEngine(settings(path, run_dir, "disk"), 0)
    await engine.start()
    print(engine.url, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await engine.aclose()


@torch.no_grad()
def step(weights: dict[str, Tensor], share: float, generator: torch.Generator) -> None:
    """Move a share of the values by one unit in the last place."""
    for tensor in weights.values():
        bits = tensor.view(-1).view(torch.int16)
        bits ^= (torch.rand(bits.shape, generator=generator) < share).to(torch.int16)


def measure(
    config: Config, url: str, rounds: int, weights: Callable[[], Tensors], versions: Iterator[int]
) -> list[PushReport]:
    publisher = open_publisher(config, [url], 0, CPU)
    publisher.connect()
    reports = [publisher.push(weights(), next(versions)) for _ in range(rounds + 1)]
    publisher.close()
    return reports[1:]  # the first push of changes is of whole weights


def row(transport: str, form: str, reports: list[PushReport], gbit: float) -> dict[str, Any]:
    num_bytes = statistics.median(report.num_bytes for report in reports)
    return {
        "transport": transport, "form": form, "bytes": num_bytes,
        "push_ms": 1e3 * statistics.median(report.seconds for report in reports),
        "pause_ms": 1e3 * statistics.median(report.pause_s for report in reports),
        "changed": statistics.median(report.changed_share for report in reports),
        "sites_s": num_bytes * 8 / (gbit * 1e9),
    }


def measure_all(path: Path, run_dir: Path, url: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    add_adapters(lm, LoraConfig(rank=RANK))
    adapters, generator = AdapterParcels(lm, torch.bfloat16), torch.Generator().manual_seed(0)
    versions = iter(range(1, 10_000))

    def changed(share: float) -> Tensors:
        step(weights, share, generator)
        return iter(weights.items())

    rows = []
    for transport in arguments.transports.split(","):
        base = settings(path, run_dir, transport)
        forms: list[tuple[str, Config, Callable[[], Tensors]]] = [
            ("whole", base, lambda: iter(weights.items())),
            (f"adapter, rank {RANK}", settings(path, run_dir, transport, lora="adapter"), adapters.parcels),
        ]
        for percent in map(float, arguments.changed.split(",")):
            sparse = replace(base, weight_sync=replace(base.weight_sync, delta=True))
            forms.append((f"delta, {percent:g} %", sparse, partial(changed, percent / 100)))
        for form, config, push in forms:
            rows.append(row(transport, form, measure(config, url, arguments.rounds, push, versions), arguments.gbit))
    return rows


def table(rows: list[dict[str, Any]], gbit: float) -> Table:
    header = ("transport", "push of", "MB", "push, ms", "pause, ms", f"bytes alone at {gbit:g} Gb/s, s")
    return Table(header, [
        [r["transport"], r["form"], f"{r['bytes'] / MB:.2f}", f"{r['push_ms']:.0f}", f"{r['pause_ms']:.0f}",
         f"{r['sites_s']:.3f}"] for r in rows
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="135m", choices=list(SIZES), help="of the random model")
    parser.add_argument("--transports", default="gloo,disk")
    parser.add_argument("--changed", default="0.39,0.81,1.8,4.5", help="shares of changed values, in percent")
    parser.add_argument("--gbit", type=float, default=1.0, help="between two sites, for the last column")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="writes OUT.md and OUT.json")
    parser.add_argument("--serve", nargs=2, type=Path, help="serve the model in a folder: MODEL RUN_DIR")
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(*arguments.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        path, run_dir = Path(folder) / "model", Path(folder)
        save_random_model(arguments.size, path)
        command = [sys.executable, "-m", "benchmarks.compact_push", "--serve", str(path), str(run_dir)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                rows = measure_all(path, run_dir, server.stdout.readline().strip(), arguments)
            finally:
                server.kill()
    about = f"`python -m benchmarks.compact_push {' '.join(sys.argv[1:])}`"
    page = f"{about}, {machine_text()}, load average {os.getloadavg()[0]:.1f} at the end. Medians of the rounds.\n\n"
    page += table(rows, arguments.gbit).markdown()
    write_page(arguments.out, page, {"machine": describe_machine(), "rows": rows})


if __name__ == "__main__":
    main()
