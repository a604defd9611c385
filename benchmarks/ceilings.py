"""What the device can do at most: a bfloat16 matrix product in TFLOP/s, a copy within its memory in GB/s.

    python -m benchmarks.ceilings

Random data: zeros take less power, and run faster than anything real. copy_gb_per_s counts each copied byte once, as
the push of weights does; traffic_gb_per_s twice, read and written, as data sheets of memory do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.machine import describe_machine
from benchmarks.push import copy_seconds

ROUNDS = 10


def product_seconds(size: int, device: torch.device) -> float:
    """Median time of one product of two size x size matrices."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    return statistics.median(_times(lambda: left @ right, device))


def _times(work: Callable[[], object], device: torch.device) -> list[float]:
    seconds = []
    for _ in range(ROUNDS + 3):
        start_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start_s)
    return seconds[3:]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192 if on_gpu else 256)
    parser.add_argument("--copy-mb", type=int, default=4096 if on_gpu else 16)
    parser.add_argument("--out", type=Path, default=Path("runs/ceilings.json"))
    arguments = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    copied_bytes = arguments.copy_mb * 2**20
    copy_gb_per_s = copied_bytes / copy_seconds(copied_bytes, device, ROUNDS) / 1e9
    found = {
        "machine": describe_machine(),
        "matmul_tflops": 2 * arguments.size**3 / product_seconds(arguments.size, device) / 1e12,
        "copy_gb_per_s": copy_gb_per_s, "traffic_gb_per_s": 2 * copy_gb_per_s,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['matmul_tflops']:.3g} TFLOP/s, {copy_gb_per_s:.3g} GB/s copied, twice that read and written")


if __name__ == "__main__":
    main()
