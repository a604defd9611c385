"""Compares the accuracy of `async-rl reward-model` with that of plain transformers, trained on the same comparisons.

    python -m benchmarks.reward_accuracy --seeds 5 --out benchmarks/results/reward_accuracy

The comparisons are those of configs/rlhf: for each seed 300 to train on and 1000 held-out ones, of answers of one
supervised model. The plain loop is what one would write with transformers alone: a classifier with one label, padded
batches of texts with their attention mask, the mean of -log sigmoid(difference), AdamW, and a schedule. It leaves out
the comparisons that async-rl leaves out, which are longer than the answers of a run, and takes the others in the same
order, in as many steps at the same peak rate. Two things in which it could differ are measured one by one: the weights
of the head at the start, of which transformers makes those of a deviation of 0.02, and the schedule of the learning
rate, which is linear in transformers' trainers.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_scheduler

from async_rl.config import Config
from async_rl.config.loading import load_config
from async_rl.stages.commands import reward_data
from async_rl.sweeps.machine import describe_machine, machine_text
from async_rl.sweeps.tables import Table, write_page
from learner.reward_training import lr_factor, train_reward_model

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "rlhf"


@dataclass(frozen=True, slots=True)
class Loop:
    """A loop over plain transformers: whether its head and its schedule are those of async-rl or of transformers."""

    has_our_head: bool
    has_our_schedule: bool

    @property
    def name(self) -> str:
        whose = {True: "our", False: "its own"}
        return f"plain, {whose[self.has_our_head]} head, {whose[self.has_our_schedule]} schedule"


OURS = "async-rl"
SAME = Loop(True, True)
LOOPS = (SAME, Loop(False, True), Loop(True, False), Loop(False, False))


@dataclass(frozen=True, slots=True)
class SeedOutcome:
    """The accuracies of one seed, and what they cost."""

    seed: int
    comparisons: int
    held_out: int
    accuracies: dict[str, float]
    """The held-out accuracy of OURS and of each loop, by name."""
    loss: float
    """The held-out loss of ours."""
    margin: float
    calibration_error: float
    cpu_s: tuple[float, float]
    """Processor time of ours, and of the loop SAME."""


def ours(config: Config, out_dir: Path) -> dict[str, float]:
    """Return the held-out metrics of our training after its last epoch."""
    *_, last = train_reward_model(config, reward_data(config), out_dir)
    return {metric.key.rpartition("held_out_")[2]: metric.value for metric in last.metrics}


def plain(config: Config, loop: Loop) -> tuple[float, int, int]:
    """Return (held-out accuracy, comparisons to train on, held-out ones) of a loop over plain transformers."""
    training, path, seed = config.reward_training, config.model.path, config.run.seed
    torch.manual_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(path, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, dtype=torch.float32).eval()
    most = config.rollout.max_response_tokens
    pairs, held_out = (_pairs(Path(file), tokenizer, most) for file in (training.path, training.eval_path))
    if loop.has_our_head:
        start = torch.randn(model.score.weight.shape, generator=torch.Generator().manual_seed(seed))
        model.score.weight.data = start / math.sqrt(model.config.hidden_size + 1)
    steps = training.epochs * math.ceil(len(pairs) / training.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, weight_decay=0.0)
    schedule: Any = get_scheduler("linear", optimizer, num_warmup_steps=steps // 20, num_training_steps=steps)
    if loop.has_our_schedule:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: lr_factor(done, steps))
    order = torch.Generator().manual_seed(seed)
    for _ in range(training.epochs):
        for indices in torch.randperm(len(pairs), generator=order).split(training.batch_size):
            chosen, rejected = _scores(model, tokenizer, [pairs[int(i)] for i in indices]).chunk(2)
            F.logsigmoid(chosen - rejected).mean().neg().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.learner.grad_clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    with torch.no_grad():
        chosen, rejected = _scores(model, tokenizer, held_out).chunk(2)
    return float((chosen > rejected).double().mean()), len(pairs), len(held_out)


def _pairs(file: Path, tokenizer: Any, most_tokens: int) -> list[tuple[str, str]]:
    """Return (text of the chosen answer, of the rejected one) with prompt and end of each comparison of a file.

    A comparison with an answer of more than `most_tokens` tokens, with its end, is left out.
    """
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    ended = [(row["prompt"], f"{row['chosen']}<eos>", f"{row['rejected']}<eos>") for row in rows]
    return [
        (f"{prompt}<sep>{chosen}", f"{prompt}<sep>{rejected}") for prompt, chosen, rejected in ended
        if max(len(tokenizer(answer)["input_ids"]) for answer in (chosen, rejected)) <= most_tokens
    ]  # fmt: skip


def _scores(model: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> torch.Tensor:
    """Return the outputs for all chosen answers, then for all rejected ones."""
    texts = [pair[side] for side in (0, 1) for pair in pairs]
    scores: torch.Tensor = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits[:, 0]
    return scores


def measured(seed: int) -> SeedOutcome:
    """Train the reward models of a seed, on comparisons in the current folder, which are made if there are none."""
    folder = Path(f"runs/rlhf/{seed}")
    if not (folder / "held_out.jsonl").is_file():
        _run(str(CONFIGS / "people.py"), "--seed", str(seed), "--out", str(folder))
    config = load_config(CONFIGS / "reward_model.yaml", [
        f"reward_training.path={folder}/comparisons.jsonl", f"reward_training.eval_path={folder}/held_out.jsonl",
        f"run.seed={seed}",
    ])  # fmt: skip
    start_s = time.process_time()
    found = ours(config, folder / "reward-model-measured")
    middle_s = time.process_time()
    accuracy, comparisons, held_out = plain(config, SAME)
    cpu_s = middle_s - start_s, time.process_time() - middle_s
    others = {loop.name: plain(config, loop)[0] for loop in LOOPS if loop != SAME}
    return SeedOutcome(
        seed, comparisons, held_out, {OURS: found["accuracy"], SAME.name: accuracy} | others, found["loss"],
        found["margin"], found["calibration_error"], cpu_s,
    )


def _run(*words: str) -> None:
    subprocess.run([sys.executable, *words], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True)


def accuracy_table(found: Sequence[SeedOutcome]) -> Table:
    """Return the accuracies of each seed, their means, and the mean differences to ours; ± is a standard error."""
    names = [OURS, *(loop.name for loop in LOOPS)]
    rows = [[str(each.seed), *(f"{each.accuracies[name]:.3f}" for name in names)] for each in found]
    rows.append(["mean", *(_mean([each.accuracies[name] for each in found]) for name in names)])
    rows.append(["less than async-rl by", "", *(
        _mean([each.accuracies[OURS] - each.accuracies[name] for each in found]) for name in names[1:]
    )])  # fmt: skip
    return Table(("seed", *names), rows, "Held-out accuracy")


def detail_table(found: Sequence[SeedOutcome]) -> Table:
    header = ("seed", "comparisons", "held-out ones", "loss of async-rl", "margin", "calibration error",
              "CPU s of async-rl", "of the plain loop")  # fmt: skip
    rows = [
        [str(each.seed), str(each.comparisons), str(each.held_out),
         *(f"{number:.3f}" for number in (each.loss, each.margin, each.calibration_error)),
         *(f"{seconds:.1f}" for seconds in each.cpu_s)]
        for each in found
    ]  # fmt: skip
    return Table(header, rows, "More")


def _mean(values: Sequence[float]) -> str:
    """Return the mean with its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--work", type=Path, default=Path("runs/over_optimisation"), help="folder for the files")
    parser.add_argument("--out", type=Path, help="also write the tables to this file, with .md and .json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # the model is tiny
    out = args.out.resolve() if args.out else None
    machine, said = machine_text(), describe_machine()
    os.chdir(args.work)  # the paths of the configurations are below it
    if not Path("runs/rlhf/sft").is_dir():
        _run("-m", "async_rl.cli", "sft", str(CONFIGS / "sft.yaml"))
    found = [measured(seed) for seed in range(args.seeds)]
    tables = "\n".join(f"## {each.title}\n\n{each.markdown()}" for each in (accuracy_table(found), detail_table(found)))
    page = f"# Reward models\n\n`python -m benchmarks.reward_accuracy {' '.join(sys.argv[1:])}`, {machine}.\n\n{tables}"
    if out:
        write_page(out, page, {"machine": said, "seeds": [asdict(each) for each in found]})
    else:
        print(page)


if __name__ == "__main__":
    main()
