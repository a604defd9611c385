"""Counts the false alarms of the certificate: runs in which nothing is wrong, and how many have a broken axis.

    python -m benchmarks.false_alarms --seeds 2

A run has the hf engine and a learner in one process: four steps of sampling, training, pushing and comparing, as in
tests/kit/engines/certified.py. Each preset trains a dense model and a mixture of experts in float32 and bfloat16, over
the whole vocabulary and over supports. Models, prompts and sampled tokens differ with the seed. With n runs and no
alarm, the rate is below 3 / n with a confidence of 95 % (Clopper and Pearson). `--minutes` ends it early.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import multiprocessing
import random
import tempfile
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import binomtest

from async_rl.base.config.algorithm import PRESETS
from async_rl.base.config.loading import load_config
from async_rl.base.host import usable_cores
from async_rl.tools.sweeps.machine import describe_machine
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text, write_page
from tests.kit.configs import changed
from tests.kit.engines.certified import certified, config_of
from tests.kit.models import save_sharp_model
from tests.kit.tiny_moe import save_moe

RESULTS = Path(__file__).parent / "results" / "false_alarms"
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
FAMILIES, DTYPES = ("dense", "experts"), ("float32", "bfloat16")
RULES: dict[str, dict[str, float]] = {"all tokens": {}, "top_p=0.9": {"top_p": 0.9}, "top_k=9": {"top_k": 9}}


def run_once(preset: str, family: str, dtype: str, rules: str, seed: int) -> dict[str, str]:
    """Return what the certificate says of the broken axes of one sound run, by name."""
    torch.manual_seed(zlib.crc32(f"{preset} {family} {dtype} {rules} {seed}".encode()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        model = save_sharp_model(path) if family == "dense" else save_moe(path, num_experts=8, num_experts_per_tok=2)
        algorithm = load_config(QUICKSTART, [f"algorithm.preset={preset}"]).algorithm
        settings = config_of(model, dtype, **RULES[rules])
        found = certified(changed(settings, run={"seed": seed}, algorithm=algorithm))
    return {name: axis.finding for name, axis in found.items() if axis.state == "broken"}


def open_process() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def run_until(end: float, kind: tuple[int, str, str, str, str]) -> dict[str, Any] | None:
    """Return a run's settings and its broken axes, or None if the time `end` has come."""
    if time.monotonic() > end:
        return None
    seed, preset, family, dtype, rules = kind
    broken = run_once(preset, family, dtype, rules, seed)
    gc.collect()  # engine and learner refer to each other
    return {"seed": seed, "preset": preset, "model": family, "dtype": dtype, "rules": rules, "broken": broken}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    found: list[dict[str, Any]] = []
    kinds = list(itertools.product(range(arguments.seeds), PRESETS, FAMILIES, DTYPES, RULES))
    random.Random(0).shuffle(kinds)  # so runs that end early are of all kinds
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(usable_cores(), mp_context=spawn, initializer=open_process) as pool:
        for number, run in enumerate(pool.map(partial(run_until, end), kinds), 1):
            if run:
                found.append(run)
                print(f"{number} of {len(kinds)}: {run}", flush=True)
    rows = []
    for (family, dtype, rules), runs in itertools.groupby(
        sorted(found, key=lambda run: (run["model"], run["dtype"], run["rules"])),
        key=lambda run: (run["model"], run["dtype"], run["rules"]),
    ):
        of_kind = list(runs)
        alarms = [name for run in of_kind for name in run["broken"]]
        rows.append([family, dtype, rules, str(len(of_kind)), str(len(alarms)), ", ".join(alarms) or "-"])
    num_alarms = sum(bool(run["broken"]) for run in found)
    table = Table(["model", "type", "sampled from", "runs", "false alarms", "axes"], rows)
    limit = binomtest(num_alarms, len(found)).proportion_ci(0.9, "exact").high  # one side of it: 95 %
    page = (
        f"# False alarms of the certificate\n\n`python -m benchmarks.false_alarms --seeds {arguments.seeds}`, "
        f"{machine_text()}.\n\n{num_alarms} of {len(found)} sound runs had an alarm; with a confidence of 95 % the "
        f"rate is below {limit:.2%}.\n\n{table.markdown()}\n\n```\n{__doc__}```\n"
    )
    write_page(arguments.out, page, {"machine": describe_machine(), "runs": found})


if __name__ == "__main__":
    main()
