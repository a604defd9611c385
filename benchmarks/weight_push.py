"""Measures the time of a weight push into a rollout server, beside a plain transfer of the same bytes.

    python -m benchmarks.weight_push --sizes 1,16,128,1024 --rounds 5
    python -m benchmarks.weight_push --sglang 1b --transports cuda_ipc,disk --rounds 5

A push pauses the server, sends the buckets, loads the weights and resumes. The pause is the time in which the server
generates nothing. Push and plain transfer take turns; the table has the medians over the rounds after the first.

gloo      buckets are announced over HTTP and broadcast with torch.distributed
disk      files in a temporary folder
cuda_ipc  the server maps the learner's GPU memory; on a CPU, shared host memory

Without --sglang the server is benchmarks/weight_receiver.py, which holds float32 tensors of at least 1 MB behind the hf
engine's weight endpoints, and the plain transfer is one broadcast of all bytes to another process. With --sglang it is
an SGLang server with a random model of the given size, and the plain transfer is one copy within the device's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.base.config import Config, ModelConfig, RolloutConfig, RunConfig, TaskConfig, WeightSyncConfig
from async_rl.base.config.resolve import resolve
from async_rl.base.errors import WaitTimeoutError
from async_rl.base.weights.publisher import open_publisher
from async_rl.base.weights.transport import serving_dtype
from async_rl.run.processes.actors import use_huge_pages
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text, write_page
from benchmarks.random_model import SIZES, save_random_model
from benchmarks.weight_receiver import ReceiverProcess, end
from buffer.keys import own_keys
from rollout_server.engines.base import open_engine

RESULTS = Path(__file__).parent / "results" / "weight_push"
WAIT_S = 120.0
"""The time limit for the two processes of the plain broadcast to wait for each other."""
MB = 2**20
MAX_TENSORS = 64

Transfer = Callable[[], float]
"""Moves the bytes once and returns the seconds that this took."""


class PlainBroadcast:
    """Times plain transfers to a process that it starts. A call broadcasts all bytes by gloo and returns the time."""

    def __init__(self, num_bytes: int) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, "-m", "benchmarks.weight_push", "--plain-receiver", f"{store.port}:{num_bytes}"]
        self.process = subprocess.Popen(command)
        self.data = torch.ones(num_bytes, dtype=torch.uint8)
        try:
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=WAIT_S))
            self()
        except RuntimeError as error:
            raise WaitTimeoutError(
                f"the process that receives the plain broadcast died, or did not answer for {WAIT_S:.0f} s"
            ) from error

    def __call__(self) -> float:
        start_s = time.monotonic()
        dist.broadcast(self.data, 0)
        dist.barrier()
        return time.monotonic() - start_s

    def close(self) -> None:
        dist.destroy_process_group()
        end(self.process)


def receive_plain(where: str) -> None:
    """Run as rank 1 of a PlainBroadcast until rank 0 ends, and exit. `where` is PORT:BYTES: store's port, size."""
    port, num_bytes = map(int, where.split(":"))
    timeout = timedelta(seconds=WAIT_S)
    store = dist.TCPStore("127.0.0.1", port, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=timeout)
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    with suppress(RuntimeError):  # the sender has ended
        while True:
            dist.broadcast(data, 0)
            dist.barrier()
    sys.exit(0)


def device_copy(num_bytes: int, device: torch.device) -> Transfer:
    """Return a function that copies `num_bytes` within the device's memory, and returns the seconds that this took."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def copy() -> float:
        start_s = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start_s

    return copy


def measure(
    config: Config, url: str, tensors: dict[str, Tensor], device: torch.device, rounds: int, plain: Transfer
) -> dict[str, Any]:
    """Time `rounds` pushes and plain transfers in turn, after one of each to warm up; return a row of the table.

    It has sizes, rates and ratios by name, from the medians over the rounds.
    """
    publisher = open_publisher(config, [url], 0, device)
    pushes, plain_s = [], []
    for version in range(1, rounds + 2):
        plain_s.append(plain())
        pushes.append(publisher.push(tensors.items(), version))
    publisher.close()
    num_bytes = pushes[0].num_bytes
    seconds = statistics.median(push.seconds for push in pushes[1:])
    pause_s = statistics.median(push.pause_s for push in pushes[1:])
    transfer_s = statistics.median(plain_s[1:])
    return {
        "transport": config.weight_sync.transport,
        "megabytes": num_bytes / MB, "gb_per_s": num_bytes / seconds / 1e9,
        "plain_gb_per_s": num_bytes / transfer_s / 1e9,
        "of_plain": transfer_s / seconds, "pause_ms": 1e3 * pause_s, "pause_of_plain": pause_s / transfer_s,
    }  # fmt: skip


def with_transport(config: Config, transport: str, bucket_mb: int) -> Config:
    """Return the config with this transport and buckets of `bucket_mb` MB."""
    sync = WeightSyncConfig(transport=transport, bucket_bytes=bucket_mb * MB)
    return dataclasses.replace(config, weight_sync=sync)


def receiver_rows(base: Config, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row of the table for each size and transport; weights go to benchmarks/weight_receiver.py."""
    rows = []
    for megabytes in map(int, arguments.sizes.split(",")):
        num_tensors = min(MAX_TENSORS, megabytes)
        num_elements = megabytes * MB // num_tensors // 4
        plain = PlainBroadcast(megabytes * MB)
        for transport in (arguments.transports or "gloo,disk").split(","):
            config = with_transport(base, transport, arguments.bucket_mb)
            with ReceiverProcess(num_tensors, config, num_elements) as receiver:
                tensors = {name: torch.full((num_elements // 512, 512), 0.5) for name in receiver.names}
                rows.append(measure(config, receiver.url, tensors, torch.device("cpu"), arguments.rounds, plain))
                assert receiver.version() == arguments.rounds + 1
        plain.close()
    return rows


async def sglang_rows(base: Config, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(base.model.path, dtype=serving_dtype(base, device.type))
    model.to(device)  # type: ignore[arg-type]
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    plain = device_copy(sum(tensor.nbytes for tensor in tensors.values()), device)
    engine = open_engine(base, 0, arguments.out.with_name(f"{arguments.out.name}-server"))
    try:
        await engine.start()
        rows = []
        for transport in (arguments.transports or "cuda_ipc,disk").split(","):
            config = with_transport(base, transport, arguments.bucket_mb)
            rows.append(
                await asyncio.to_thread(measure, config, engine.url, tensors, device, arguments.rounds, plain)
            )
        return rows
    finally:
        await engine.aclose()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,16,128,1024", help="MB (2**20 bytes) to push without --sglang")
    parser.add_argument("--sglang", choices=list(SIZES), help="push a random model of this size to an SGLang server")
    parser.add_argument("--server-args", type=json.loads, default={}, help="JSON, as rollout.server_args")
    parser.add_argument("--transports", help="default: gloo,disk; with --sglang: cuda_ipc,disk")
    parser.add_argument("--bucket-mb", type=int, default=WeightSyncConfig().bucket_bytes // MB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="writes OUT.md and OUT.json")
    parser.add_argument("--plain-receiver", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    use_huge_pages()
    if arguments.plain_receiver:
        torch.set_num_threads(1)
        receive_plain(arguments.plain_receiver)
    with tempfile.TemporaryDirectory() as folder:
        base = Config(
            model=ModelConfig(path=folder), run=RunConfig(dir=folder), task=TaskConfig(name="reasoning_gym/chain_sum"),
            rollout=RolloutConfig(
                engine="sglang" if arguments.sglang else "hf", gpu_memory_utilization=0.3,
                    server_args=arguments.server_args
            ),
        )  # fmt: skip
        if arguments.sglang:
            save_random_model(arguments.sglang, Path(folder))
            with own_keys(base, Path(folder) / "keys") as keys:
                rows = asyncio.run(sglang_rows(resolve(base, keys), arguments))
        else:
            torch.set_num_threads(1)
            rows = receiver_rows(base, arguments)
    header = ("transport", "MB", "GB/s", "plain GB/s", "of plain", "pause, ms", "pause / plain transfer")
    lines = [
        [row["transport"], f"{row['megabytes']:.0f}", f"{row['gb_per_s']:.2f}", f"{row['plain_gb_per_s']:.2f}",
         f"{row['of_plain']:.2f}", f"{row['pause_ms']:.0f}", f"{row['pause_of_plain']:.2f}"]
        for row in rows
    ]  # fmt: skip
    command = f"`python -m benchmarks.weight_push {' '.join(sys.argv[1:])}`"
    load = f"load average {os.getloadavg()[0]:.1f} at the end"
    page = f"{command}, {machine_text()}, {load}. Medians of the rounds after the first.\n\n"
    write_page(arguments.out, page + Table(header, lines).markdown(), {"machine": describe_machine(), "rows": rows})


if __name__ == "__main__":
    main()
