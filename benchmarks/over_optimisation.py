"""Measures how the true reward falls where a policy overdoes a reward model, as in Gao et al. 2022, arXiv 2210.10760.

    python -m benchmarks.over_optimisation --seeds 10 --out benchmarks/results/over_optimisation
    python -m benchmarks.over_optimisation --seeds 2 --first-seed 4          # a part; the same --work joins the parts

For each seed the stages of configs/rlhf are run by their commands: comparisons by people.py, a reward model of them,
and three trainings from one supervised model, which all seeds share: without a KL penalty, the same with a guard that
goes back and lowers the learning rate, and as ppo.yaml has it. The limits of the guard are its defaults, and its gold
labels those of 64 held-out answers every five steps. KL is that of an answer to the supervised model, in nats: the mean
of a token times the mean length. The proxy is the reward of the reward model, the gold the task's own. Both are means
of the step's answers, smoothed over five steps. A run that its guard has ended ends with the version that it keeps;
what a rollback discards is not in its curve. A folder --work that holds runs of an earlier call is gone on with.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.storage.guard_events import read_guard_events
from async_rl.sweeps.machine import describe_machine, machine_text
from async_rl.sweeps.tables import Table, write_page
from async_rl.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[1]
WINDOW = 5
FREE, GUARDED = "no penalty", "no penalty, guard"
NO_PENALTY = ["algorithm.kl.coef=1e-9", "algorithm.ptx_coef=0.0", "task.pretrain_path="]
GUARD = [
    "guard.action=rollback", "guard.tighten=lr", "guard.every_steps=5", "eval.every_steps=5", "eval.size=64",
    "eval.samples=1", "checkpoint.every_steps=5",
]  # fmt: skip
KINDS = {FREE: NO_PENALTY, GUARDED: [*NO_PENALTY, *GUARD], "ppo.yaml": []}
"""The trainings and the settings by which they differ from ppo.yaml."""
BIN = 0.25
"""The width in d of the bins over which the mean of all seeds is drawn."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A training: KL of an answer in nats, proxy and gold after each step, smoothed."""

    kind: str
    seed: int
    kl: np.ndarray
    proxy: np.ndarray
    gold: np.ndarray
    rollbacks: tuple[tuple[int, int], ...] = ()
    """(version at which the guard found trouble, version to which it went back), in order."""
    ends_at: int = 0
    """The version with which the guard ended the run; 0: it did not."""

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
    events = read_guard_events(run_dir)
    ends_at = next((event.back_to for event in events if event.kind == "stop"), 0)
    kl, proxy, gold = (_smooth(np.array(column, float))[: ends_at or None] for column in columns)
    rollbacks = tuple((event.version, event.back_to) for event in events if event.kind == "rollback")
    return Curve(kind, seed, kl, proxy, gold, rollbacks, ends_at)


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return means over WINDOW neighbours, of fewer at the ends."""
    ones = np.ones(WINDOW)
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


def fit(curves: Sequence[Curve]) -> tuple[float, float, float]:
    """Return (a, b, R^2) of the RL form of Gao et al., gold - gold at the start = d (a - b log d), d = sqrt(KL).

    It is fitted to the points of all curves together.
    """
    d = np.sqrt(np.maximum(np.concatenate([each.kl for each in curves]), 1e-6))
    gain = np.concatenate([each.gold - each.gold[0] for each in curves])
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
                   each.proxy[0], each.proxy[each.peak], each.proxy[-1], fit([each])[2]]
        rows.append([each.kind, str(each.seed), *(f"{number:.2f}" for number in numbers)])
    return Table(header, rows, "Runs")


def by_kind(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Return the curves of each kind, in the order of their first ones."""
    return {kind: [each for each in curves if each.kind == kind] for kind in dict.fromkeys(c.kind for c in curves)}


def mean_table(curves: Sequence[Curve]) -> Table:
    """Return the means over the seeds of each kind of training, with their standard errors."""
    header = ("training", "seeds", "gold at the start", "at its peak", "at the end", "proxy at the start", "at the end",
              "KL at the peak of gold", "at the end", "a", "b", "R^2")  # fmt: skip
    rows = []
    for kind, same in by_kind(curves).items():
        columns = [[c.gold[0] for c in same], [c.gold[c.peak] for c in same], [c.gold[-1] for c in same],
                   [c.proxy[0] for c in same], [c.proxy[-1] for c in same], [c.kl[c.peak] for c in same],
                   [c.kl[-1] for c in same]]  # fmt: skip
        rows.append([kind, str(len(same)), *map(_mean, columns), *(f"{number:.2f}" for number in fit(same))])
    return Table(header, rows, "Means, and the fit gold - gold at the start = d (a - b log d), d = sqrt(KL)")


def guard_table(curves: Sequence[Curve]) -> Table:
    """Return, for each seed that was trained with the guard and without it, what the guard did and what it kept."""
    header = ("seed", "gold at the start", "without the guard: at its peak", "at the end", "with it: at the end",
              "share of the gain", "trouble found at and gone back to", "ended with")  # fmt: skip
    free, guarded = ({each.seed: each for each in curves if each.kind == kind} for kind in (FREE, GUARDED))
    rows = []
    for seed in sorted(free.keys() & guarded.keys()):
        without, guard = free[seed], guarded[seed]
        numbers = [without.gold[0], without.gold[without.peak], without.gold[-1], guard.gold[-1], kept(without, guard)]
        went_back = ", ".join(f"{version} to {back_to}" for version, back_to in guard.rollbacks) or "-"
        rows.append([str(seed), *(f"{number:.2f}" for number in numbers), went_back, str(guard.ends_at or "the steps")])
    return Table(header, rows, "What the guard keeps")


def kept(without: Curve, guard: Curve) -> float:
    """Return what a run with the guard has gained at its end, as a share of the most that the one without it gained."""
    return float(guard.gold[-1] - without.gold[0]) / without.gain if without.gain > 0 else math.nan


def _mean(values: Sequence[float]) -> str:
    """Return the mean with its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.2f} ± {error:.2f}"


def summary(curves: Sequence[Curve]) -> str:
    """Return a sentence for each kind of training: in how many seeds gold rose, and fell while the proxy went on."""
    lines = []
    for kind, same in by_kind(curves).items():
        rose = sum(each.gold[-1] > each.gold[0] for each in same)
        fell = sum(each.kept < 0.5 and each.proxy[-1] > each.proxy[each.peak] for each in same)
        start, peak, end = (statistics.fmean(values) for values in (
            [each.gold[0] for each in same], [each.gold[each.peak] for each in same], [each.gold[-1] for each in same]
        ))  # fmt: skip
        lines.append(
            f"- {kind}, {len(same)} seeds: gold {start:.2f} at the start, {peak:.2f} at its peak, {end:.2f} at the "
            f"end. It ended above its start in {rose}; in {fell} it lost more than half of its gain while the proxy "
            "rose on."
        )
    free, guarded = ({each.seed: each for each in curves if each.kind == kind} for kind in (FREE, GUARDED))
    if shares := [kept(free[seed], guarded[seed]) for seed in sorted(free.keys() & guarded.keys())]:
        lines.append(
            f"- The guard kept {statistics.fmean(shares):.2f} of the gain of the run without it in the mean, at least "
            f"0.9 in {sum(share >= 0.9 for share in shares)} of {len(shares)} seeds."
        )
    return "\n".join(lines)


def draw(curves: Sequence[Curve], file: Path) -> None:
    """Draw proxy and gold of each kind against d = sqrt(KL), with the fit, and gold of all kinds over the steps.

    Each seed is a thin line; the thick one is the mean, in a band of one standard deviation of the seeds.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = by_kind(curves)
    figure, axes = plt.subplots(1, len(kinds) + 1, figsize=(5 * len(kinds) + 5, 4), sharey=True, squeeze=False)
    *of_kinds, over_steps = axes[0]
    for axis, (kind, same) in zip(of_kinds, kinds.items(), strict=True):
        d = [np.sqrt(np.maximum(each.kl, 0)) for each in same]
        for name, color in (("proxy", "#0072B2"), ("gold", "#D55E00")):
            values = [getattr(each, name) for each in same]
            _draw_band(axis, d, values, BIN, color, name)
        a, b, _ = fit(same)
        grid = np.linspace(0.05, max(float(each.max()) for each in d), 200)
        start = statistics.fmean(each.gold[0] for each in same)
        axis.plot(grid, start + grid * (a - b * np.log(grid)), "k--", lw=1.2, label=f"d ({a:.2f} - {b:.2f} log d)")
        axis.set(title=f"{kind}, {len(same)} seeds", xlabel="d = sqrt(KL of an answer in nats)", ylabel="reward")
    for (kind, same), color in zip(kinds.items(), ("#D55E00", "#009E73", "#CC79A7", "#56B4E9"), strict=False):
        steps = [np.arange(1.0, len(each.gold) + 1) for each in same]
        _draw_band(over_steps, steps, [each.gold for each in same], 1.0, color, kind)
    over_steps.set(title="gold over the steps", xlabel="step")
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _draw_band(
    axis: Any, x: Sequence[np.ndarray], y: Sequence[np.ndarray], width: float, color: str, label: str
) -> None:
    """Draw a line for each seed, and their mean and standard deviation in bins that at least half of them reach."""
    for xs, ys in zip(x, y, strict=True):
        axis.plot(xs, ys, color=color, lw=0.6, alpha=0.35)
    centres, mean, deviation = band(x, y, width)
    axis.plot(centres, mean, color=color, lw=2, label=label)
    axis.fill_between(centres, mean - deviation, mean + deviation, color=color, alpha=0.2, lw=0)


def band(
    x: Sequence[np.ndarray], y: Sequence[np.ndarray], width: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (middles of the bins, means of y over the seeds, standard deviations over them).

    A seed's value in a bin is the mean of its points there. Bins with points of less than half of the seeds are left
    out.
    """
    bins = [np.floor(xs / width).astype(int) for xs in x]
    found = []
    for number in range(max(int(each.max()) for each in bins) + 1):
        values = [float(ys[each == number].mean()) for each, ys in zip(bins, y, strict=True) if (each == number).any()]
        if 2 * len(values) >= len(x):
            found.append(((number + 0.5) * width, statistics.fmean(values), float(np.std(values))))
    centres, mean, deviation = np.array(found).T
    return centres, mean, deviation


def read_curves(file: Path) -> list[Curve]:
    """Return the curves that `numbers_of` has put into a results file."""
    return [
        Curve(**each | {name: np.array(each[name]) for name in ("kl", "proxy", "gold")}
              | {"rollbacks": tuple(map(tuple, each["rollbacks"]))})
        for each in json.loads(file.read_text())["curves"]
    ]  # fmt: skip


def numbers_of(curve: Curve) -> dict[str, Any]:
    """Return a curve as JSON has it."""
    columns = {name: [round(float(x), 4) for x in getattr(curve, name)] for name in ("kl", "proxy", "gold")}
    return asdict(curve) | columns


def page_of(curves: Sequence[Curve]) -> str:
    """Return the results in Markdown."""
    tables = [table for table in (mean_table(curves), guard_table(curves), curve_table(curves)) if table.rows]
    return summary(curves) + "\n" + "".join(f"\n## {table.title}\n\n{table.markdown()}" for table in tables)


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
        name = f"{kind.replace(',', '').replace(' ', '-')}-{seed}"
        if not is_over(work / "runs" / name):
            shutil.rmtree(work / "runs" / name, ignore_errors=True)
            text = [] if settings else [f"task.pretrain_path={folder}/texts.jsonl"]
            _run(
                work, "-m", "async_rl.cli", "train", str(config / "ppo.yaml"), scores, f"run.name={name}",
                f"run.seed={seed}", f"run.steps={steps}", "rollout.engine=hf", "logging.wandb=disabled", *settings,
                *text, *overrides,
            )  # fmt: skip
        curves.append(read_curve(work / "runs" / name, kind, seed))
    return curves


def is_over(run_dir: Path) -> bool:
    """Return whether a run has ended, and not by a rollback after which it goes on."""
    file = run_dir / "summary.json"
    return file.is_file() and "rolled_back" not in json.loads(file.read_text())


def _run(work: Path, *words: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words], cwd=work, env=environment, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--work", type=Path, default=Path("runs/over_optimisation"), help="folder for the runs")
    parser.add_argument("--out", type=Path, help="write this file with .md, .json and .png")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for all trainings")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    curves: list[Curve] = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        curves += trained(args.work.resolve(), seed, args.steps, args.overrides)
        print(summary(curves), flush=True)
    curves.sort(key=lambda each: (list(KINDS).index(each.kind), each.seed))
    page = page_of(curves)
    if args.out:
        said = " ".join(sys.argv[1:])
        text = f"# Over-optimisation\n\n`python -m benchmarks.over_optimisation {said}`, {machine_text()}.\n\n{page}"
        write_page(args.out, text, {"machine": describe_machine(), "curves": [numbers_of(each) for each in curves]})
        draw(curves, args.out.with_suffix(".png"))
    else:
        print(page)


if __name__ == "__main__":
    main()
