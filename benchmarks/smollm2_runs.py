"""Trains SmolLM2-135M on two cores with several seeds, and writes what it learned, how fast, and in how much memory.

    python -m benchmarks.smollm2 models/SmolLM2-135M-Instruct
    python -m benchmarks.smollm2_runs --seeds 3 --out benchmarks/results/smollm2

The runs are those of configs/smollm2_cpu.yaml, one after another. Memory is the largest resident set of each process,
looked at once a second. Tokens and seconds are those of the steps after the first; minutes are of the whole command,
with its start and its three evaluations.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.tables import Table, write_page
from async_rl.telemetry.metrics import read_metrics
from benchmarks.marked_command import MarkedCommand

CONFIG = "configs/smollm2_cpu.yaml"
FIRST, LAST = 2, 10
"""The steps at the start and at the end whose mean training reward is told; version 0 samples the first two."""
PARTS = {"learner": "ray::LearnerActor", "rollout": "ray::RolloutActor", "driver": "async_rl.cli train"}
"""The processes whose memory is told, by a part of their command line; the rest are Ray's and the buffer's."""
SAMPLED_S = 1.0
Values = dict[str, float]


def of_part(command_line: str) -> str:
    """Return to which of PARTS a process belongs, or `rest`."""
    return next((name for name, words in PARTS.items() if words in command_line), "rest")


def add_peaks(peaks: Values, processes: Iterable[psutil.Process]) -> None:
    """Raise each part's largest resident bytes to those of its processes now."""
    now: Values = {}
    for process in processes:
        with suppress(psutil.Error, OSError):
            part = of_part(" ".join(process.cmdline()))
            now[part] = now.get(part, 0.0) + process.memory_info().rss
    now["all"] = sum(now.values())
    for part, size in now.items():
        peaks[part] = max(peaks.get(part, 0.0), size)


def train(seed: int, overrides: Sequence[str], runs: Path) -> tuple[Path, Values, float]:
    """Train with a seed; return the run directory, the peaks of memory in bytes by part, and the minutes it took.

    Raises:
        RuntimeError: the run failed. The message has the end of its output.
    """
    run_dir = runs / f"seed-{seed}"
    words = ["train", CONFIG, f"run.dir={runs}", f"run.name={run_dir.name}", f"run.seed={seed}", *overrides]
    began_s = time.monotonic()
    command = MarkedCommand([*words, "logging.wandb=disabled"], runs / f"seed-{seed}.log")
    peaks: Values = {}
    try:
        while command.process.poll() is None:
            add_peaks(peaks, command.processes())
            time.sleep(SAMPLED_S)
    finally:
        command.kill()
    if command.process.returncode:
        raise RuntimeError(f"seed {seed} ended with {command.process.returncode}:\n{command.text()[-3000:]}")
    return run_dir, peaks, (time.monotonic() - began_s) / 60


def results_of(run_dir: Path, peaks: Mapping[str, float], minutes: float) -> Values:
    """Return the figures of a run that has ended."""
    summary: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    records = [each for each in read_metrics(run_dir / "metrics.jsonl") if each.get("reward/mean") is not None]
    rewards = [float(each["reward/mean"] or 0.0) for each in records]
    figures = {
        "accuracy_start": summary["accuracy_start"], "accuracy_end": summary["accuracy_end"],
        "reward_start": summary["eval_reward_start"], "reward_end": summary["eval_reward_end"],
        "trained_first": statistics.fmean(rewards[:FIRST]), "trained_last": statistics.fmean(rewards[-LAST:]),
        "staleness_mean": summary["staleness_mean"], "tokens_per_s": summary["tokens_per_s"],
        "step_s": summary["seconds"] / max(1, len(records) - 1), "minutes": minutes,
        "learner": summary["utilisation/learner"], "rollout": summary["utilisation/rollout"],
    }  # fmt: skip
    return figures | {f"{part}_gb": size / 1e9 for part, size in peaks.items()}


def table_of(results: Mapping[int, Values]) -> Table:
    header = ("seed", "held-out accuracy, start", "end", "held-out reward, start", "end",
              f"training reward, first {FIRST} steps", f"last {LAST}", "staleness", "tokens/s", "s a step", "minutes",
              "learner GB", "rollout GB", "all GB")  # fmt: skip
    keys = ("accuracy_start", "accuracy_end", "reward_start", "reward_end", "trained_first", "trained_last",
            "staleness_mean", "tokens_per_s", "step_s", "minutes", "learner_gb", "rollout_gb", "all_gb")  # fmt: skip
    digits = (3, 3, 3, 3, 3, 3, 2, 0, 1, 1, 1, 1, 1)
    return Table(header, [
        [str(seed), *(f"{values[key]:.{number}f}" for key, number in zip(keys, digits, strict=True))]
        for seed, values in results.items()
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True, help="the page's and the numbers' file, without a suffix")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        for seed in range(args.seeds):
            results[seed] = results_of(*train(seed, args.overrides, Path(folder)))
    text = f"`python -m benchmarks.smollm2_runs {' '.join(sys.argv[1:])}`, {machine_text()}."
    write_page(args.out, f"# SmolLM2-135M on two cores\n\n{text}\n\n{table_of(results).markdown()}", results)


if __name__ == "__main__":
    main()
