"""Measures how the true reward falls where a policy overdoes a reward model, as in Gao et al. 2022, arXiv 2210.10760.

    python -m benchmarks.over_optimisation --seeds 10 --out benchmarks/results/over_optimisation

For each seed the stages of configs/rlhf are run by their commands: comparisons by people.py, a reward model of them,
and two trainings from one supervised model, which all seeds share: without a KL penalty, and as ppo.yaml has it. KL is
that of an answer to the supervised model, in nats: the mean of a token times the mean length. The proxy is the reward
of the reward model, the gold the task's own. Both are means of the step's answers, smoothed over five steps. A folder
--work that holds runs of an earlier call is gone on with.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.tables import Table
from async_rl.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[1]
WINDOW = 5
KINDS = {
    "no penalty": ["algorithm.kl.coef=1e-9", "algorithm.ptx_coef=0.0", "task.pretrain_path="],
    "ppo.yaml": [],
}
"""The trainings and the settings by which they differ from ppo.yaml."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A training: KL of an answer in nats, proxy and gold after each step, smoothed."""

    kind: str
    seed: int
    kl: np.ndarray
    proxy: np.ndarray
    gold: np.ndarray

    @property
    def peak(self) -> int:
        return int(self.gold.argmax())

    @property
    def gain(self) -> float:
        """How much higher gold is at its peak than at the start."""
        return float(self.gold[self.peak] - self.gold[0])

    @property
    def kept(self) -> float:
        """The share of the gain that is left at the end; negative if gold ends below its start."""
        return float(self.gold[-1] - self.gold[0]) / self.gain if self.gain > 0 else math.nan


def read_curve(run_dir: Path, kind: str, seed: int) -> Curve:
    """Return the curve of a run with a reward model and a reference."""
    steps = [step for step in read_metrics(run_dir / "metrics.jsonl") if step.get("reward/rule_mean") is not None]
    columns = [
        [(step["kl/reference"] or 0.0) * (step["response/length_mean"] or 0.0) for step in steps],
        [step["reward/mean"] for step in steps], [step["reward/rule_mean"] for step in steps],
    ]  # fmt: skip
    kl, proxy, gold = (_smooth(np.array(column, float)) for column in columns)
    return Curve(kind, seed, kl, proxy, gold)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return means over WINDOW neighbours, of fewer at the ends."""
    ones = np.ones(WINDOW)
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


def fit(curve: Curve) -> tuple[float, float, float]:
    """Return (a, b, R^2) of the RL form of Gao et al., gold - gold at the start = d (a - b log d), d = sqrt(KL)."""
    d, gain = np.sqrt(np.maximum(curve.kl, 1e-6)), curve.gold - curve.gold[0]
    basis = np.stack([d, -d * np.log(d)], 1)
    (a, b), *_ = np.linalg.lstsq(basis, gain, rcond=None)
    residual = gain - basis @ np.array([a, b])
    return float(a), float(b), 1 - float(residual @ residual) / float(((gain - gain.mean()) ** 2).sum())


def curve_table(curves: Sequence[Curve]) -> Table:
    header = (
        "training", "seed", "gold at the start", "at its peak", "at the end", "gain kept", "KL at the peak",
        "at the end", "proxy at the start", "at the peak", "at the end", "R^2 of d (a - b log d)",
    )  # fmt: skip
    rows = []
    for each in curves:
        numbers = [each.gold[0], each.gold[each.peak], each.gold[-1], each.kept, each.kl[each.peak], each.kl[-1],
                   each.proxy[0], each.proxy[each.peak], each.proxy[-1], fit(each)[2]]
        rows.append([each.kind, str(each.seed), *(f"{number:.2f}" for number in numbers)])
    return Table(header, rows)


def summary(curves: Sequence[Curve]) -> str:
    """Return a sentence for each kind of training: in how many seeds gold rose, and fell while the proxy went on."""
    lines = []
    for kind in dict.fromkeys(each.kind for each in curves):
        same = [each for each in curves if each.kind == kind]
        rose = sum(each.gold[-1] > each.gold[0] for each in same)
        fell = sum(each.kept < 0.5 and each.proxy[-1] > each.proxy[each.peak] for each in same)
        peak, end = (sum(values) / len(same) for values in (
            [each.gold[each.peak] for each in same], [each.gold[-1] for each in same]
        ))  # fmt: skip
        lines.append(
            f"- {kind}, {len(same)} seeds: gold {sum(each.gold[0] for each in same) / len(same):.2f} at the start, "
            f"{peak:.2f} at its peak, {end:.2f} at the end. It ended above its start in {rose}; in {fell} it lost more "
            "than half of its gain while the proxy rose on."
        )
    return "\n".join(lines)


def draw(curves: Sequence[Curve], file: Path) -> None:
    """Draw proxy and gold against sqrt(KL): each seed thin, and gold's fit to the points of all seeds dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = list(dict.fromkeys(each.kind for each in curves))
    figure, axes = plt.subplots(1, len(kinds), figsize=(5.5 * len(kinds), 4), sharey=True, squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=True):
        same = [each for each in curves if each.kind == kind]
        for number, each in enumerate(same):
            d = np.sqrt(np.maximum(each.kl, 0))
            axis.plot(d, each.proxy, color="#0072B2", lw=0.8, alpha=0.7, label=None if number else "proxy")
            axis.plot(d, each.gold, color="#D55E00", lw=0.8, alpha=0.7, label=None if number else "gold")
        joined = Curve(kind, -1, *(np.concatenate([getattr(each, name) for each in same]) for name in
                                   ("kl", "proxy", "gold")))  # fmt: skip
        a, b, _ = fit(joined)
        d = np.linspace(0.05, math.sqrt(max(joined.kl.max(), 0.01)), 200)
        axis.plot(d, joined.gold[0] + d * (a - b * np.log(d)), "k--", lw=1.2, label=f"d ({a:.2f} - {b:.2f} log d)")
        axis.set(title=f"{kind}, {len(same)} seeds", xlabel="d = sqrt(KL of an answer in nats)", ylabel="reward")
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def write_curves(curves: Sequence[Curve], file: Path) -> None:
    with file.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(["training", "seed", "step", "kl", "proxy", "gold"])
        for each in curves:
            for step, values in enumerate(zip(each.kl, each.proxy, each.gold, strict=True), 1):
                writer.writerow([each.kind, each.seed, step, *(f"{value:.4f}" for value in values)])


def trained(work: Path, seed: int, steps: int, overrides: Sequence[str]) -> list[Curve]:
    """Run the stages of a seed in the folder `work`, and return the curve of each training."""
    config = ROOT / "configs" / "rlhf"
    if not (work / "runs/rlhf/sft").is_dir():
        _run(work, "-m", "async_rl.cli", "sft", str(config / "sft.yaml"))
    folder = Path(f"runs/rlhf/{seed}")
    files = [f"reward_training.path={folder}/comparisons.jsonl", f"reward_training.eval_path={folder}/held_out.jsonl"]
    scores = f"reward_model.path={folder}/reward-model"
    if not (work / folder / "reward-model").is_dir():
        _run(work, str(config / "people.py"), "--seed", str(seed), "--out", str(folder))
        _run(work, "-m", "async_rl.cli", "reward-model", str(config / "reward_model.yaml"), *files, scores,
             f"run.seed={seed}")  # fmt: skip
    curves = []
    for kind, settings in KINDS.items():
        name = f"{kind.replace(' ', '-')}-{seed}"
        if not (work / "runs" / name / "model").is_dir():
            shutil.rmtree(work / "runs" / name, ignore_errors=True)  # a run that did not end
            text = [] if settings else [f"task.pretrain_path={folder}/texts.jsonl"]
            _run(
                work, "-m", "async_rl.cli", "train", str(config / "ppo.yaml"), scores, f"run.name={name}",
                f"run.seed={seed}", f"run.steps={steps}", "logging.wandb=disabled", *settings, *text, *overrides,
            )  # fmt: skip
        curves.append(read_curve(work / "runs" / name, kind, seed))
    return curves


def _run(work: Path, *words: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words], cwd=work, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--work", type=Path, default=Path("runs/over_optimisation"), help="folder for the runs")
    parser.add_argument("--out", type=Path, help="write this file with .md, .csv and .png")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for both trainings")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    curves: list[Curve] = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        curves += trained(args.work.resolve(), seed, args.steps, args.overrides)
        print(summary(curves), flush=True)
    curves.sort(key=lambda each: (list(KINDS).index(each.kind), each.seed))
    page = f"{summary(curves)}\n\n{curve_table(curves).markdown()}"
    print(page)
    if args.out:
        said = " ".join(sys.argv[1:])
        text = f"# Over-optimisation\n\n`python -m benchmarks.over_optimisation {said}`, {machine_text()}.\n\n{page}\n"
        args.out.with_suffix(".md").write_text(text)
        write_curves(curves, args.out.with_suffix(".csv"))
        draw(curves, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
