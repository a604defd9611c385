"""Compares batches of few and of many prompts, at equal numbers of answers, by the runs of collapsing_runs.py.

    python -m benchmarks.batch_sizes --out benchmarks/results/batch_sizes

Each run trains on the same number of prompts, 8 answers to each, one pass and synchronously, so that a batch of a
quarter of the size makes four times as many steps. The reward is that of the last eighth of the answers.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.tables import Table, write_page
from benchmarks.collapsing_runs import GROUP, WordsRun, supervised, train

PROMPTS = 1280
SIZES = (4, 16, 64)
RATES = (1.5e-4, 3e-4, 6e-4, 1.2e-3)
LAST = 0.125


@dataclass(frozen=True, slots=True)
class BatchRun:
    """The mean reward of each step of a run."""

    prompts: int
    lr: float
    seed: int
    rewards: Sequence[float]

    @property
    def end(self) -> float:
        return statistics.fmean(self.rewards[-round(len(self.rewards) * LAST) :])


def made(cell: tuple[int, float, int], work: Path) -> BatchRun:
    """Return the rewards of a run; it is made unless `work` holds them."""
    prompts, lr, seed = cell
    file = work / f"batch-{prompts}-{lr:g}.{seed}.json"
    if not file.is_file():
        torch.set_num_threads(1)
        over = {"learner.prompts_per_step": prompts}
        run = WordsRun(f"{prompts} prompts", seed, lr, steps=PROMPTS // prompts, over=over)
        file.write_text(json.dumps([record["true/reward"] for record in train(run, supervised(run, work))]))
        print(file.name, flush=True)
    return BatchRun(prompts, lr, seed, json.loads(file.read_text()))


def table(runs: Sequence[BatchRun]) -> Table:
    """Return the mean and the standard error of the reward at the end, a row for each size, a column for each rate."""
    rates = sorted({run.lr for run in runs})
    rows = []
    for size in sorted({run.prompts for run in runs}):
        cells = [[run.end for run in runs if (run.prompts, run.lr) == (size, lr)] for lr in rates]
        rows.append([str(size), str(PROMPTS // size), *map(mean_with_error, cells)])
    return Table(("prompts a step", "steps", *(f"rate {lr:g}" for lr in rates)), rows, "Reward at the end")


def mean_with_error(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.3f} ± {error:.3f}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/batch_sizes"), help="runs in it are not made again")
    parser.add_argument("--out", type=Path, help="also write the table to this file, with .md and .json")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    supervised(WordsRun("", 0, 0.0), args.work)
    cells = [(size, lr, 300 + seed) for seed in range(args.seeds) for size in SIZES for lr in RATES]
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("forkserver")) as pool:
        runs = list(pool.map(partial(made, work=args.work), cells))
    start = statistics.fmean(run.rewards[0] for run in runs)
    page = (
        f"`python -m benchmarks.batch_sizes`, {args.seeds} seeds, {machine_text()}.\n\nReward at the end after "
        f"{PROMPTS} prompts with {GROUP} answers each, mean and standard error; {start:.2f} at the start.\n\n"
        f"{table(runs).markdown()}"
    )
    numbers = [{"prompts": run.prompts, "lr": run.lr, "seed": run.seed, "end": run.end} for run in runs]
    if args.out:
        write_page(args.out, page, numbers)
    print(page)


if __name__ == "__main__":
    main()
