"""How fast weights get from the learner's memory into a running SGLang server, against a plain copy of the same bytes.

    python -m benchmarks.push --size 1b --transports cuda_ipc,disk --rounds 5

push    everything: pause, buckets, loading, resume; parameters as the learner holds them (serving type, no gathering)
copy    one device-to-device copy of the same bytes, from one buffer to another; each byte counted once, as for the push

benchmarks/weight_sync.py measures the same without SGLang. On a CPU cuda_ipc shares host memory, buckets whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.config import Config, ModelConfig, RolloutConfig, RunConfig, TaskConfig, WeightSyncConfig
from async_rl.weights import open_publisher
from async_rl.weights.base import serving_dtype
from benchmarks.machine import describe_machine
from benchmarks.random_model import SIZES, save_random_model
from rollout_server.engines.base import Engine, open_engine


def copy_seconds(num_bytes: int, device: torch.device, rounds: int) -> float:
    """Median time to copy so many bytes within the device's memory."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(rounds + 2):
        _finish(device)
        start_s = time.perf_counter()
        target.copy_(source)
        _finish(device)
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[2:])


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(
    config: Config, url: str, tensors: dict[str, Tensor], device: torch.device, rounds: int
) -> dict[str, Any]:
    """Medians of `rounds` pushes, after one to warm up."""
    publisher = open_publisher(config, [url], 0, device)
    publisher.connect()
    reports = [publisher.push(tensors.items(), version) for version in range(1, rounds + 2)][1:]
    publisher.close()
    num_bytes = reports[0].num_bytes
    seconds = statistics.median(report.seconds for report in reports)
    copy_s = copy_seconds(num_bytes, device, rounds)
    return {
        "transport": config.weight_sync.transport, "megabytes": num_bytes / 2**20,
        "bucket_megabytes": config.weight_sync.bucket_bytes / 2**20, "gb_per_s": num_bytes / seconds / 1e9,
        "copy_gb_per_s": num_bytes / copy_s / 1e9, "of_copy": copy_s / seconds,
        "pause_ms": 1e3 * statistics.median(report.pause_s for report in reports), "push_ms": 1e3 * seconds,
    }


class Serving:
    """The engine of a config, in an event loop of its own; its log is kept in `logs`."""

    def __init__(self, config: Config, logs: Path) -> None:
        self.engine: Engine = open_engine(config, 0, logs)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._timeout_s = config.timeouts.server_start_s

    def __enter__(self) -> str:
        asyncio.run_coroutine_threadsafe(self.engine.start(), self._loop).result(self._timeout_s + 60)
        return self.engine.url

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.engine.aclose(), self._loop).result(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="3m")
    parser.add_argument("--transports", default="cuda_ipc,disk")
    default_mb = WeightSyncConfig().bucket_bytes // 2**20 if torch.cuda.is_available() else 4
    parser.add_argument("--bucket-mb", type=int, default=default_mb, help="default: %(default)s here")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server-args", type=json.loads, default={}, help="JSON, as rollout.server_args")
    parser.add_argument("--out", type=Path, default=Path("runs/push.json"))
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(arguments.size, Path(folder) / "model")
        base = Config(
            model=ModelConfig(path=str(Path(folder) / "model")), run=RunConfig(dir=folder),
            task=TaskConfig(name="reasoning_gym/chain_sum"),
            rollout=RolloutConfig(mem_fraction=0.3, server_args=arguments.server_args),
        )
        dtype = serving_dtype(base, device.type)
        model = AutoModelForCausalLM.from_pretrained(base.model.path, dtype=dtype)
        model.to(device)  # type: ignore[arg-type]
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        rows = []
        with Serving(base, arguments.out.with_name(f"{arguments.out.stem}-server")) as url:
            for transport in arguments.transports.split(","):
                sync = WeightSyncConfig(transport=transport, bucket_bytes=arguments.bucket_mb * 2**20)
                config = Config(
                    model=base.model, run=base.run, task=base.task, rollout=base.rollout, weight_sync=sync
                )
                rows.append(measure(config, url, tensors, device, arguments.rounds))
                row = rows[-1].items()
                print("  ".join(f"{k} {v if isinstance(v, str) else f'{v:.3g}'}" for k, v in row), flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"machine": describe_machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
