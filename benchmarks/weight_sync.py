"""How fast weights get into a rollout server, against a bare broadcast of the same bytes.

    python -m benchmarks.weight_sync --sizes 1,16,128,1024 --rounds 5

bare      one torch.distributed broadcast of all the bytes at once, from memory, to one other process: nothing else
gloo      a whole push: pause, buckets announced over HTTP and broadcast, loading, resume (nccl where there are GPUs)
background  the same, but the server goes on while buckets arrive and pauses to load them (weight_sync.background)
disk      a whole push through files in a temporary folder

The server is benchmarks/weight_receiver.py: the hf engine's weight endpoints around a bag of float32 tensors of 1 MB
and more. Bare and push take turns. Pause is what the server stands still. Results: benchmarks/results/weight_sync.md
"""

from __future__ import annotations

import argparse
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

from async_rl.config import Config, ModelConfig, RolloutConfig, RunConfig, TaskConfig, WeightSyncConfig
from async_rl.driver.actors import use_huge_pages
from async_rl.errors import WaitTimeoutError
from async_rl.weights import open_publisher
from benchmarks.machine import describe_machine
from benchmarks.weight_receiver import ReceiverProcess, end

RESULTS = Path(__file__).parent / "results" / "weight_sync.md"
WAIT_S = 120.0
"""Of the bare broadcast's two processes for each other."""
MB = 2**20
MAX_TENSORS = 64


class BareBroadcast:
    """Rank 0 of a group of two; rank 1 is a process of its own."""

    def __init__(self, num_bytes: int) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, "-m", "benchmarks.weight_sync", "--bare-receiver", f"{store.port}:{num_bytes}"]
        self.process = subprocess.Popen(command)
        self.data = torch.ones(num_bytes, dtype=torch.uint8)
        try:
            dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=WAIT_S))
            self()
        except RuntimeError as error:
            raise WaitTimeoutError(f"the benchmark lost its bare receiver, or waited {WAIT_S:.0f} s for it") from error

    def __call__(self) -> float:
        """Seconds until the other process has everything."""
        start_s = time.monotonic()
        dist.broadcast(self.data, 0)
        dist.barrier()
        return time.monotonic() - start_s

    def close(self) -> None:
        dist.destroy_process_group()
        end(self.process)


def receive_bare(where: str) -> None:
    port, num_bytes = map(int, where.split(":"))
    timeout = timedelta(seconds=WAIT_S)
    store = dist.TCPStore("127.0.0.1", port, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=timeout)
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    with suppress(RuntimeError):  # the sender is done
        while True:
            dist.broadcast(data, 0)
            dist.barrier()
    sys.exit(0)


def measure(
    transport: str, num_bytes: int, bucket_bytes: int, rounds: int, bare: Callable[[], float]
) -> dict[str, Any]:
    """Medians over rounds of push and bare broadcast in turn."""
    num_tensors = min(MAX_TENSORS, max(1, num_bytes // MB))
    num_elements = num_bytes // num_tensors // 4
    background = transport == "background"
    weight_sync = WeightSyncConfig(
        transport="gloo" if background else transport,  # type: ignore[arg-type]
        background=background, bucket_bytes=bucket_bytes,
    )
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            model=ModelConfig(path=folder), task=TaskConfig(name="reasoning_gym/chain_sum"), run=RunConfig(dir=folder),
            rollout=RolloutConfig(engine="hf"), weight_sync=weight_sync,
        )
        with ReceiverProcess(num_tensors, config, num_elements) as receiver:
            publisher = open_publisher(config, [receiver.url], 0, torch.device("cpu"))
            publisher.connect()
            tensors = {name: torch.full((num_elements // 512, 512), 0.5) for name in receiver.names}
            pushes, bares = [], []
            for version in range(1, rounds + 2):
                bares.append(bare())
                pushes.append(publisher.push(tensors.items(), version))
            assert receiver.version() == rounds + 1
            publisher.close()
    warm_pushes, warm_bares = pushes[1:], bares[1:]
    seconds = statistics.median(p.seconds for p in warm_pushes)
    bare_s = statistics.median(warm_bares)
    return {
        "transport": transport, "megabytes": num_bytes / MB, "bucket_megabytes": bucket_bytes / MB,
        "gb_per_s": num_bytes / seconds / 1e9, "bare_gb_per_s": num_bytes / bare_s / 1e9, "of_bare": bare_s / seconds,
        "pause_ms": 1e3 * statistics.median(p.pause_s for p in warm_pushes),
        "pause_of_push": statistics.median(p.pause_s / p.seconds for p in warm_pushes),
        "pause_of_bare": statistics.median(p.pause_s for p in warm_pushes) / bare_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1,16,128,1024", help="MB (2**20 bytes), one after the other")
    parser.add_argument("--transports", default="gloo,background,disk")
    parser.add_argument("--bucket-mb", type=int, default=WeightSyncConfig().bucket_bytes // MB)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--bare-receiver", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    use_huge_pages()
    torch.set_num_threads(1)
    if arguments.bare_receiver:
        receive_bare(arguments.bare_receiver)
    rows: list[dict[str, Any]] = []
    for megabytes in map(int, arguments.sizes.split(",")):
        bare = BareBroadcast(megabytes * MB)
        for transport in arguments.transports.split(","):
            row = measure(transport, megabytes * MB, arguments.bucket_mb * MB, arguments.rounds, bare)
            rows.append(row)
            print("  ".join(f"{key} {v if isinstance(v, str) else f'{v:.3g}'}" for key, v in row.items()), flush=True)
        bare.close()
    arguments.out.write_text(table(rows, f"python -m benchmarks.weight_sync {' '.join(sys.argv[1:])}"))


def table(rows: list[dict[str, Any]], command: str) -> str:
    machine = describe_machine()
    lines = [
        "| transport | MB | GB/s | bare GB/s | of bare | pause, ms | pause / bare transfer |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {row['transport']} | {row['megabytes']:.0f} | {row['gb_per_s']:.2f} | {row['bare_gb_per_s']:.2f} "
        f"| {row['of_bare']:.2f} | {row['pause_ms']:.0f} | {row['pause_of_bare']:.2f} |"
        for row in rows
    ]
    where = ", ".join(machine[key] for key in ("processor", "system", "commit")) + f", {machine['cores']} cores"
    load = f"load average {os.getloadavg()[0]:.1f} at the end"
    head = f"`{command}`, {where}, {load}. Medians of the rounds after the first."
    return "\n".join([head, "", *lines, ""])


if __name__ == "__main__":
    main()
