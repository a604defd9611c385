"""Measures the rules of the watcher: false alarms in sound runs, power in runs that break, and where they go back to.

    python -m benchmarks.watcher --out benchmarks/results/watcher

Simulated runs have no trend, so that every alarm is false: batches of rewards 0 and 1 of prompts of many difficulties,
and evaluations with gold labels of a policy that stands, wanders or almost always fails. Then a fall is added. Recorded
runs are real trainings of small models, results/watcher_runs.json.gz: 40 with a reward model or gold rewards (20 are
over-optimised), and 130 that reverse or sort letters (48 collapse). benchmarks/guard.py and benchmarks/collapse.py of
commit 11e594f3 made them.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from async_rl.base.config.watch import RULES
from async_rl.run.watch.watcher import Finding, Watcher
from async_rl.tools.sweeps.tables import Table
from benchmarks.page import machine_text

RECORDS = Path(__file__).parent / "results" / "watcher_runs.json.gz"
LIMITS = {name: rule.limit for name, rule in RULES.items()}
GROUP = 8
GAINS = (0.0, 0.1, 0.3)
Record = Mapping[str, float]
Rewards = np.ndarray


def first_alarm(records: Iterator[Record], rule: str, group: int = GROUP, after: int = 0) -> int | None:
    """Return the step of the first alarm of one rule."""
    watcher = Watcher({rule: LIMITS[rule]}, group)
    for record in records:
        found = watcher.add(int(record["step"]), record)
        if found and rule in found.new and found.version > after:
            return found.version
    return None


# ---------------------------------------------------------------- rewards of training


def batch(rng: np.random.Generator, mean: float, prompts: int, is_filtered: bool, spread: float = 1.85) -> Rewards:
    """Return rewards 0 and 1 of a batch, [prompts, GROUP]; `is_filtered`: groups of equal rewards are replaced."""
    if mean <= 0:
        return np.zeros((prompts, GROUP))
    rows = np.zeros((0, GROUP))
    while len(rows) < prompts:
        solved = rng.beta(spread * mean, spread * (1 - mean), 4 * prompts if is_filtered else prompts)
        drawn = (rng.random((len(solved), GROUP)) < solved[:, None]).astype(float)
        counts = drawn.sum(1)
        rows = np.concatenate([rows, drawn[(counts > 0) & (counts < GROUP)] if is_filtered else drawn])
    return rows[:prompts]


def training(
    rng: np.random.Generator, means: Sequence[float], prompts: int, is_filtered: bool
) -> Iterator[Record]:
    for step, mean in enumerate(means, 1):
        rewards = batch(rng, mean, prompts, is_filtered)
        yield {
            "step": step, "batch/episodes": float(rewards.size), "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()), "staleness/mean": 1.0,
        }  # fmt: skip


def reward_rows(runs: int) -> list[list[str]]:
    """Return, for each size of batch, the false alarms of 1,000 steps, and how soon a fall to nothing is seen."""
    rows = []
    for is_filtered in (False, True):
        for prompts in (4, 8, 16, 32, 64):
            false, seen = [], []
            for gain in GAINS:
                rng = np.random.default_rng(1)
                means = [0.35 + gain * min(1, step / 50) for step in range(1, 1001)]
                found = [first_alarm(training(rng, means, prompts, is_filtered), "reward") for _ in range(runs)]
                false.append(f"{sum(each is not None for each in found)} of {runs}")
                fall = [*means[:200], *[0.0] * 10]
                runs_that_fall = (training(rng, fall, prompts, is_filtered) for _ in range(runs))
                late = [first_alarm(run, "reward", after=200) for run in runs_that_fall]
                seen.append(f"{sum(each is not None and each <= 202 for each in late)} of {runs}")
            rows.append([str(prompts), "yes" if is_filtered else "no", *false, *seen])
    return rows


# ---------------------------------------------------------------- gold labels of evaluations


def gold_record(step: int, rewards: Rewards) -> Record:
    return {
        "step": float(step), "eval/gold": float(rewards.mean()), "eval/gold_squared": float((rewards**2).mean()),
        "eval/gold_labels": float(len(rewards)),
    }  # fmt: skip


def evaluations(rng: np.random.Generator, kind: str, labels: int, count: int, falls_at: int = 0) -> Iterator[Record]:
    """Yield evaluations of a policy without a trend, after `falls_at` of one that gets nothing right.

    Args:
        kind: `same`, the same questions; `fresh` ones; `wander`, solve rates that move and return; or a solve rate.
    """
    rates = rng.beta(1.2, 1.0, labels)
    middle = place = np.log(rates / (1 - rates))
    for number in range(count):
        if kind == "fresh":
            rates = rng.beta(1.2, 1.0, labels)
        elif kind == "wander":
            place = middle + 0.9 * (place - middle) + 0.3 * rng.normal(size=labels)
            rates = 1 / (1 + np.exp(-place))
        elif kind != "same":
            rates = np.full(labels, float(kind))
        if falls_at and number >= falls_at:
            rates = np.zeros(labels)
        yield gold_record(5 * number, (rng.random(labels) < rates).astype(float))


def gold_rows(runs: int) -> list[list[str]]:
    rows = []
    for labels in (64, 256):
        for kind in ("same", "wander", "fresh", "0.001", "0.005", "0.02", "0.1"):
            row = [str(labels), kind if kind.isalpha() else f"{float(kind):.1%} right"]
            rng = np.random.default_rng(0)
            found = [first_alarm(evaluations(rng, kind, labels, 200), "gold") for _ in range(runs)]
            row.append(f"{sum(each is not None for each in found)} of {runs}")
            seen = "-"
            if kind.isalpha():
                rng = np.random.default_rng(0)
                late = [first_alarm(evaluations(rng, kind, labels, 110, 100), "gold", after=499) for _ in range(runs)]
                seen = f"{sum(each is not None and each <= 505 for each in late)} of {runs}"
            rows.append([*row, seen])
    return rows


# ---------------------------------------------------------------- KL and diversity


def growing(rng: np.random.Generator, kind: str, steps: int = 1000) -> Iterator[Record]:
    """Yield steps of a sound run: the reward rises and the KL with it, with noise and now and then a spike of one step.

    `linear`, `root` and `saturating`: the form of the KL, to 0.5 to 2 nats a token. Answers repeat twice as much.
    """
    most = rng.uniform(0.5, 2.0)
    for step in range(1, steps + 1):
        share = step / steps
        form = {"linear": share, "root": math.sqrt(share), "saturating": 1 - math.exp(-10 * share)}[kind]
        spike = 5.0 if rng.random() < 0.01 else 1.0
        yield {
            "step": step, "batch/episodes": 128.0, "kl/reference": most * form * spike * math.exp(0.2 * rng.normal()),
            "reward/mean": 0.3 + 0.5 * form + 0.04 * rng.normal(), "reward/std": 0.4,
            "response/distinct_fraction": 0.9 - 0.45 * form + 0.05 * rng.normal(),
        }  # fmt: skip


def growth_rows(runs: int) -> list[list[str]]:
    rows = []
    for kind in ("linear", "root", "saturating"):
        row = [kind]
        for rule in ("reference_kl", "diversity"):
            rng = np.random.default_rng(2)
            found = [first_alarm(growing(rng, kind), rule) for _ in range(runs)]
            row.append(f"{sum(each is not None for each in found)} of {runs}")
        rows.append(row)
    return rows


# ---------------------------------------------------------------- recorded runs


def median_of_three(values: Sequence[float]) -> list[float]:
    parts = [values[max(0, place - 1) : place + 2] for place in range(len(values))]
    return [statistics.fmean(part) for part in parts]


class Recorded:
    """A recorded run: its metrics by step, and the true reward of some versions, smoothed."""

    def __init__(self, run: Mapping[str, Mapping[str, list[float]]], is_words: bool) -> None:
        self.setting, self.group = run["setting"], 8 if is_words else 12
        steps = [dict(zip(run["steps"], values, strict=True)) for values in zip(*run["steps"].values(), strict=True)]
        if is_words:  # the record of step t is of the answers of version t - 1 and older
            self.records: list[Record] = [
                {"step": number, "batch/episodes": 128.0, **each} for number, each in enumerate(steps, 1)
            ]
            raw = [each["true/reward"] for each in self.records]
            self.true = [statistics.median(raw[max(0, i - 2) : i + 3]) for i in range(len(raw))]
            self.versions = list(range(len(raw)))
            self.start = raw[0]
        else:
            found = run["evaluations"]
            evals = [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
            self.records = sorted([*steps, *evals], key=lambda each: each["step"])
            self.true = median_of_three(found["true/gold"])
            self.versions = [int(step) for step in found["step"]]
            self.start = self.true[0]
        self.gain = max(self.true) - self.start

    def kept(self, version: int) -> float:
        """Return the share of the gain that a version has."""
        known = max((v for v in self.versions if v <= version), default=0)
        return (self.true[self.versions.index(known)] - self.start) / self.gain if self.gain > 0 else 1.0

    @property
    def is_over_optimised(self) -> bool:
        return self.gain > 0.5 and self.kept(self.versions[-1]) < 0.9

    @property
    def collapsed_at(self) -> int | None:
        """The first step after the best whose true reward has lost half of a gain of 0.2 or more, for good."""
        best = max(range(len(self.true)), key=self.true.__getitem__)
        half = (self.true[best] + self.start) / 2
        if self.gain < 0.2 or self.true[-1] >= half:
            return None
        return next(i for i in range(best, len(self.true)) if self.true[i] < half) + 1

    @property
    def is_sound(self) -> bool:
        """Whether the true reward has never lost half of its gain, or of its start where it has gained little."""
        best = -math.inf
        for each in self.true:
            best = max(best, each)
            if each < ((best + self.start) / 2 if best - self.start >= 0.2 else self.start / 2):
                return False
        return True

    def findings(self, rules: Mapping[str, float], has_gold: bool = True) -> list[Finding]:
        watcher = Watcher(rules, self.group)
        seen = [r for r in self.records if has_gold or "eval/gold" not in r]
        return [found for each in seen if (found := watcher.add(int(each["step"]), each)) and found.new]


def fires(run: Recorded, rule: str) -> int | None:
    found = run.findings({rule: LIMITS[rule]})
    return found[0].version if found else None


def recorded_rows(over: Sequence[Recorded], words: Sequence[Recorded]) -> list[list[str]]:
    """Return, for each rule, in how many sound runs it fires, in how many others, and how late in collapses."""
    sound_over = [run for run in over if not run.is_over_optimised]
    hacked = [run for run in over if run.is_over_optimised]
    sound_words, collapsed = [r for r in words if r.is_sound], [r for r in words if r.collapsed_at]
    rows = []
    for name in ("reward", "reference_kl", "diversity", "gold", "cut"):
        counts = [
            f"{sum(fires(run, name) is not None for run in runs)} of {len(runs)}"
            for runs in (sound_over, sound_words, hacked, collapsed)
        ]
        late = [at - int(run.collapsed_at or 0) for run in collapsed if (at := fires(run, name)) is not None]
        rows.append([name, *counts, f"{statistics.median(late):+g}" if late else "-"])
    return rows


def back_rows(over: Sequence[Recorded]) -> list[list[str]]:
    """Return how many over-optimised runs go back at the first trouble to a version with 0.9 of the gain."""
    rows = []
    for words, has_gold in (("with 64 gold labels an evaluation", True), ("without gold labels", False)):
        shares, false, sound = [], 0, 0
        for run in over:
            trouble = next((each for each in run.findings(LIMITS, has_gold) if each.trouble), None)
            if run.is_over_optimised:
                shares.append(run.kept(trouble.back_to if trouble else run.versions[-1]))
            else:
                sound, false = sound + 1, false + (trouble is not None)
        good = sum(share >= 0.9 for share in shares)
        rows.append([
            words, f"{good} of {len(shares)}", f"{statistics.fmean(shares):.2f}", f"{false} of {sound}"
        ])  # fmt: skip
    return rows


def page_of(runs: int) -> str:
    """Return the results in Markdown."""
    records = json.loads(gzip.decompress(RECORDS.read_bytes()))
    over, words = ([Recorded(run, kind == "words") for run in records[kind]] for kind in ("over-optimised", "words"))
    tables = [
        Table(("the watcher reads", "over-optimised runs that keep 0.9 of their gain", "kept, mean",
               "trouble in sound runs"), back_rows(over), "Recorded over-optimisation: where the first trouble leads"),
        Table(("rule", "fires in sound runs of these", "in sound runs of letters", "in over-optimised runs",
               "in collapses", "median steps after half is lost"), recorded_rows(over, words), "Recorded runs"),
        Table(("prompts a step", "groups of equal rewards replaced",
               *(f"false alarms, gain {gain}" for gain in GAINS), *(f"fall seen, gain {gain}" for gain in GAINS)),
              reward_rows(runs), "Rule `reward`: 1,000 steps without a fall, and a fall to nothing seen in two steps"),
        Table(("labels", "policy", "`gold`: false alarms", "`gold`: fall seen"),
              gold_rows(runs), "Gold labels: 200 evaluations without a fall, and a fall to nothing seen in two"),
        Table(("form of the KL", "`reference_kl`: false alarms", "`diversity`: false alarms"), growth_rows(runs),
              "1,000 steps of a sound run whose KL grows"),
    ]  # fmt: skip
    return "".join(f"\n## {table.title}\n\n{table.markdown()}\n" for table in tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20, help="simulated runs of each setting")
    parser.add_argument("--out", type=Path, help="write this file with .md")
    args = parser.parse_args()
    said = " ".join(sys.argv[1:])
    bound = f"0 of {args.runs} runs means, at 95 % confidence, at most {1 - 0.05 ** (1 / args.runs):.0%} of runs."
    page = f"# Watcher\n\n`python -m benchmarks.watcher {said}`, {machine_text()}.\n\n{bound}\n{page_of(args.runs)}"
    print(page)
    if args.out:
        args.out.with_suffix(".md").write_text(page)


if __name__ == "__main__":
    main()
