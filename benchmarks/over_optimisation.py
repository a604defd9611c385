"""Measures how the true reward falls where a policy overdoes a reward model, as in Gao et al. 2022, arXiv 2210.10760.

    python -m benchmarks.over_optimisation --seeds 10 --out benchmarks/results/over_optimisation
    python -m benchmarks.over_optimisation --seeds 2 --first-seed 4          # a part; the same --work joins the parts

For each seed the stages of configs/rlhf are run by their commands: comparisons by people.py, a reward model of them,
and trainings from one supervised model, which all seeds share:

    no penalty              without a KL penalty and a pretraining term
    no penalty, guard       the same with the guard, whose rollbacks lower the learning rate
    weak penalty, guard     the same with a quarter of the penalty of ppo.yaml, which rollbacks raise
    ppo.yaml                as it is

The limits of the guard are its defaults, and its gold labels those of 64 held-out answers every five steps. KL is that
of an answer to the supervised model, in nats: the mean of a token times the mean length. The proxy is the reward of the
reward model, the gold the task's own. Both are means of the step's answers, smoothed over five steps. A run that its
guard has ended ends with the version that it keeps; what a rollback discards is not in its curve. Where the guard only
warns, its first trouble is that which it finds in the metrics of the run, with their gold labels every ten steps, and
without them. A folder --work that holds runs of an earlier call is gone on with.
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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.config.guard import GuardConfig
from async_rl.guard.decision import Guard
from async_rl.guard.signals import EVALUATIONS
from async_rl.storage.guard_events import read_guard_events
from async_rl.sweeps.machine import describe_machine, machine_text
from async_rl.sweeps.tables import Table, write_page
from async_rl.telemetry.metrics import read_metrics
from benchmarks.reward_curves import Curve, by_kind, curve_table, draw, mean_table

ROOT = Path(__file__).parents[1]
WINDOW, EVERY = 5, 5
"""The steps over which curves are smoothed, and those from one evaluation of the guard to the next."""
NO_PENALTY = ["algorithm.kl.coef=1e-9", "algorithm.ptx_coef=0.0", "task.pretrain_path="]
WEAK_PENALTY = ["algorithm.kl.coef=0.075", *NO_PENALTY[1:]]
GUARD = [
    "guard.action=rollback", f"guard.every_steps={EVERY}", f"eval.every_steps={EVERY}", "eval.size=64",
    "eval.samples=1", f"checkpoint.every_steps={EVERY}",
]  # fmt: skip
KINDS = {
    "no penalty": NO_PENALTY, "no penalty, guard": [*NO_PENALTY, *GUARD, "guard.tighten=lr"],
    "weak penalty, guard": [*WEAK_PENALTY, *GUARD], "ppo.yaml": [],
}  # fmt: skip
"""The trainings and the settings by which they differ from ppo.yaml."""
WITH_GOLD, WITHOUT = "with gold labels", "without"
"""The keys of a curve's troubles."""
COLUMNS = ("kl", "proxy", "gold", "first_gold")
"""The fields of a curve that are columns of numbers."""


def read_curve(run_dir: Path, kind: str, seed: int) -> Curve:
    """Return the curve of a run with a reward model and a reference."""
    steps = [step for step in read_metrics(run_dir / "metrics.jsonl") if _has_gold(step)]
    columns = [
        [(step["kl/reference"] or 0.0) * (step["response/length_mean"] or 0.0) for step in steps],
        [step["reward/mean"] for step in steps], [step["reward/rule_mean"] for step in steps],
    ]  # fmt: skip
    events = read_guard_events(run_dir)
    ends_at = next((event.back_to for event in events if event.kind == "stop"), 0)
    kl, proxy, gold = (_smooth(np.array(column, float))[: ends_at or None] for column in columns)
    rollbacks = tuple((event.version, event.back_to) for event in events if event.kind == "rollback")
    first_gold = _smooth(_gold_until(run_dir, rollbacks[0][0])) if rollbacks else np.zeros(0)
    acted = [(event.version, event.back_to, ", ".join(event.signals)) for event in events]
    troubles = {WITH_GOLD: acted[0]} if acted else {} if "guard" in kind else first_troubles(run_dir)
    return Curve(kind, seed, kl, proxy, gold, rollbacks, ends_at, first_gold, troubles)


def first_troubles(run_dir: Path) -> dict[str, tuple[int, int, str]]:
    """Return the first trouble that a guard with the usual limits finds in the metrics of a run."""
    guards, found = {WITH_GOLD: Guard(GuardConfig()), WITHOUT: Guard(GuardConfig())}, dict[str, tuple[int, int, str]]()
    for record in read_metrics(run_dir / "metrics.jsonl"):
        values = {key: value for key, value in record.items() if value is not None}
        for name, guard in guards.items():
            seen = {key: value for key, value in values.items() if name == WITH_GOLD or not key.startswith("eval/")}
            finding = guard.add(int(values["step"]), seen)
            if finding and finding.is_trouble and name not in found:
                found[name] = (finding.version, max(0, finding.back_to), ", ".join(finding.beyond))
    return found


def _gold_until(run_dir: Path, version: int) -> np.ndarray:
    """Return gold after each step up to `version`, as it was when the run made that step for the first time."""
    first: dict[int, tuple[float, float]] = {}
    for record in (record for file in run_dir.glob("metrics*.jsonl") for record in read_metrics(file)):
        step = int(record["step"] or 0)
        if _has_gold(record) and step <= version:
            made = (record["time/written_at_s"] or 0.0, record["reward/rule_mean"] or 0.0)
            first[step] = min(first.get(step, made), made)
    return np.array([first[step][1] for step in sorted(first)])


def _has_gold(record: Mapping[str, float | None]) -> bool:
    return record.get("reward/rule_mean") is not None


def _smooth(values: np.ndarray, width: int = WINDOW) -> np.ndarray:
    """Return means over `width` neighbours, of fewer at the ends; as many values as there are."""
    ones = np.ones(min(width, len(values)))
    return np.convolve(values, ones, "same") / np.convolve(np.ones_like(values), ones, "same")


def guarded(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    """Return the curves of each kind of training that has a guard which acts."""
    return {kind: same for kind, same in by_kind(curves).items() if "guard" in kind}


def guard_table(curves: Sequence[Curve]) -> Table:
    """Return what the guard did in each run, and how gold was before and after."""
    header = ("training", "seed", "gold at the start", "at its best before the first rollback", "at that rollback",
              "at the end", "share of the gain before it", "went back", "ended with")  # fmt: skip
    rows = []
    for each in (each for same in guarded(curves).values() for each in same):
        before = each.first_gold if each.rollbacks else each.gold
        numbers = [each.gold[0], before.max(), before[-1], each.gold[-1], kept(each)]
        went_back = ", ".join(f"{version} to {back_to}" for version, back_to in each.rollbacks) or "never"
        end = f"version {each.ends_at}, by the guard" if each.ends_at else f"step {len(each.gold)}"
        rows.append([each.kind, str(each.seed), *(f"{number:.2f}" for number in numbers), went_back, end])
    return Table(header, rows, "What the guard did")


def trouble_table(curves: Sequence[Curve]) -> Table:
    """Return the guard's first trouble in each run, and the share of the gain that the version to go back to has."""
    header = ("training", "seed", *(f"{name}: {column}" for name in (WITH_GOLD, WITHOUT) for column in (
        "trouble at step", "signals", "back to", "which has of the gain")))  # fmt: skip
    rows = []
    for each in curves:
        cells: list[str] = []
        for name in (WITH_GOLD, WITHOUT):
            version, back_to, signals = each.troubles.get(name, (0, 0, ""))
            cells += [str(version), signals, str(back_to), f"{gone_back(each, back_to):.2f}"] if version else ["-"] * 4
        rows.append([each.kind, str(each.seed), *cells])
    return Table(header, rows, "The first trouble")


def gone_back(curve: Curve, version: int) -> float:
    """Return what a run has gained at a version, as a share of the most that it gained without a rollback.

    Gold is smoothed once more, over the steps of three evaluations together, as in benchmarks/guard.py: the highest
    point of a noisier curve lies above the gold of each version.
    """
    gold = curve.first_gold if curve.rollbacks else curve.gold
    smooth = _smooth(gold, EVALUATIONS * EVERY - WINDOW + 1)
    gain = float(smooth.max() - gold[0])
    return float(smooth[max(0, version - 1)] - gold[0]) / gain if gain > 0 else math.nan


def troubles_told(curves: Sequence[Curve]) -> Iterator[str]:
    """Yield sentences on the guard's first trouble in each kind of training. One that acts has gold labels."""
    for kind, same in by_kind(curves).items():
        for name in (WITH_GOLD,) if "guard" in kind else (WITH_GOLD, WITHOUT):
            found = [each for each in same if name in each.troubles]
            shares = [gone_back(each, each.troubles[name][1]) for each in found]
            told = f"- {kind}, the guard {name}: trouble in {len(found)} of {len(same)}"
            yield told + (
                f". The version to go back to has at least 0.9 of the gain in {sum(each >= 0.9 for each in shares)}, "
                f"and {statistics.fmean(shares):.2f} of it in the mean." if found else "."
            )  # fmt: skip


def kept(curve: Curve) -> float:
    """Return what a run has gained at its end, as a share of the most that it had gained before its first rollback."""
    before = curve.first_gold if curve.rollbacks else curve.gold
    gain = float(before.max() - curve.gold[0])
    return float(curve.gold[-1] - curve.gold[0]) / gain if gain > 0 else math.nan


def summary(curves: Sequence[Curve]) -> str:
    """Return sentences on each kind of training: how gold rose and fell, and what the guard made of that."""
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
    for kind, same in guarded(curves).items():
        acted = [each for each in same if each.rollbacks]
        if not acted:
            continue
        at_rollback, shares = statistics.fmean(each.first_gold[-1] for each in acted), [kept(each) for each in acted]
        lines.append(
            f"- {kind}: {len(acted)} of {len(same)} runs went back, from a gold of {at_rollback:.2f} in the mean. They "
            f"ended with {statistics.fmean(each.gold[-1] for each in acted):.2f}, with at least 0.9 of what they had "
            f"gained at their best before in {sum(share >= 0.9 for share in shares)}, and above that in "
            f"{sum(share > 1 for share in shares)}; {sum(not each.ends_at for each in acted)} trained to the last step."
        )
    return "\n".join([*lines, *troubles_told(curves)])


def read_curves(file: Path) -> list[Curve]:
    """Return the curves that `numbers_of` has put into a results file."""
    return [
        Curve(**each | {name: np.array(each[name], float) for name in COLUMNS}
              | {"rollbacks": tuple(map(tuple, each["rollbacks"]))}
              | {"troubles": {name: tuple(found) for name, found in each["troubles"].items()}})
        for each in json.loads(file.read_text())["curves"]
    ]  # fmt: skip


def numbers_of(curve: Curve) -> dict[str, Any]:
    """Return a curve as JSON has it."""
    return asdict(curve) | {name: [round(float(x), 4) for x in getattr(curve, name)] for name in COLUMNS}


def page_of(curves: Sequence[Curve]) -> str:
    """Return the results in Markdown."""
    made = (mean_table(curves), guard_table(curves), trouble_table(curves), curve_table(curves))
    tables = [table for table in made if table.rows]
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
        draw(curves, args.out.with_suffix(".png"), shows_steps=True)
    else:
        print(page)


if __name__ == "__main__":
    main()
