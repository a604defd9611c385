"""Compares the accuracy of `async-rl reward-model` with that of plain transformers, trained on the same comparisons.

    python -m benchmarks.reward_accuracy --seeds 5 --out benchmarks/results/reward_accuracy

The comparisons are those of configs/rlhf: for each seed 300 to train on and 1000 held-out ones, of answers of one
supervised model. The plain loop is what one would write with transformers alone: a classifier with one label, padded
batches with their attention mask, the mean of -log sigmoid(difference), AdamW, and a linear schedule. It is trained
twice: with the head that transformers starts, whose weights have a deviation of 0.02, and with a head and a schedule
like ours, but other random numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_scheduler

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.stages.commands import reward_data
from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.tables import Table, write_page
from learner.reward_training import lr_factor, train_reward_model

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "rlhf"


def ours(config: Config, out_dir: Path) -> dict[str, float]:
    """Return the held-out metrics of our training after its last epoch."""
    *_, last = train_reward_model(config, reward_data(config), out_dir)
    return {metric.key.rpartition("held_out_")[2]: metric.value for metric in last.metrics}


def plain(config: Config, starts_like_ours: bool) -> float:
    """Return the held-out accuracy of the loop over plain transformers, with its own start and schedule or with ours.
    """
    training, path = config.reward_training, config.model.path
    torch.manual_seed(config.run.seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    pairs, held_out = (_pairs(Path(file), tokenizer) for file in (training.path, training.eval_path))
    steps = training.epochs * math.ceil(len(pairs) / training.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=0.0)
    schedule: Any = get_scheduler("linear", optimizer, num_warmup_steps=steps // 20, num_training_steps=steps)
    if starts_like_ours:
        torch.nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.config.hidden_size + 1))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: lr_factor(done, steps))
    for _ in range(training.epochs):
        for indices in torch.randperm(len(pairs)).split(training.batch_size):
            chosen, rejected = _scores(model, tokenizer, [pairs[int(i)] for i in indices]).chunk(2)
            F.logsigmoid(chosen - rejected).mean().neg().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    with torch.no_grad():
        chosen, rejected = _scores(model, tokenizer, held_out).chunk(2)
    return float((chosen > rejected).float().mean())


def _pairs(file: Path, tokenizer: Any) -> list[tuple[str, str]]:
    """Return (text of the chosen answer, of the rejected one) with prompt and end of each comparison of a file."""
    rows = map(json.loads, file.read_text().splitlines())
    return [
        (f"{row['prompt']}<sep>{row['chosen']}<eos>", f"{row['prompt']}<sep>{row['rejected']}<eos>") for row in rows
    ]


def _scores(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    """Return the outputs for all chosen answers, then for all rejected ones."""
    texts = [pair[side] for side in (0, 1) for pair in pairs]
    scores: torch.Tensor = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    return scores


def measured(work: Path, seeds: int) -> Table:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    os.chdir(work)  # the paths of the configurations are below it
    if not Path("runs/rlhf/sft").is_dir():
        words = [sys.executable, "-m", "async_rl.cli", "sft", str(CONFIGS / "sft.yaml")]
        subprocess.run(words, env=environment, check=True)
    rows: list[list[str]] = []
    accuracies: list[tuple[float, ...]] = []
    for seed in range(seeds):
        folder = Path(f"runs/rlhf/{seed}")
        if not (folder / "held_out.jsonl").is_file():
            words = [sys.executable, str(CONFIGS / "people.py"), "--seed", str(seed), "--out", str(folder)]
            subprocess.run(words, env=environment, check=True)
        config = load_config(CONFIGS / "reward_model.yaml", [
            f"reward_training.path={folder}/comparisons.jsonl", f"reward_training.eval_path={folder}/held_out.jsonl",
            f"run.seed={seed}",
        ])  # fmt: skip
        start_s = time.process_time()
        found = ours(config, folder / "reward-model-measured")
        middle_s = time.process_time()
        like_ours = plain(config, starts_like_ours=True)
        times = middle_s - start_s, time.process_time() - middle_s
        accuracies.append((found["accuracy"], like_ours, plain(config, starts_like_ours=False)))
        numbers = [*accuracies[-1], found["loss"], found["margin"], found["calibration_error"]]
        rows.append([str(seed), *(f"{number:.3f}" for number in numbers), *(f"{seconds:.1f}" for seconds in times)])
    rows.append(["mean", *map(_mean, zip(*accuracies, strict=True)), *[""] * 5])
    header = (
        "seed", "ours", "plain transformers, our start", "plain transformers, its own", "loss, ours", "margin",
        "calibration error", "CPU s, ours", "plain",
    )  # fmt: skip
    return Table(header, rows, "Held-out accuracy")


def _mean(values: Sequence[float]) -> str:
    """Return the mean with its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.3f} ± {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("runs/over_optimisation"), help="folder for the files")
    parser.add_argument("--out", type=Path, help="also write the table to this file, with .md and .json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    out = args.out.resolve() if args.out else None
    table = measured(args.work.resolve(), args.seeds)
    page = (
        f"# Reward models\n\n`python -m benchmarks.reward_accuracy {' '.join(sys.argv[1:])}`, {machine_text()}.\n\n"
        f"{table.title}, 300 comparisons, 1000 held-out ones.\n\n{table.markdown()}"
    )
    if out:
        write_page(out, page, {"header": table.header, "rows": table.rows})
    else:
        print(page)


if __name__ == "__main__":
    main()
