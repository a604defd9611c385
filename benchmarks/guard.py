"""Measures what the guard is worth: how much of the gain it keeps in over-optimised runs, and its false alarms.

    python -m benchmarks.guard --out benchmarks/results/guard
    python -m benchmarks.guard --tuning                          # the runs with which limits were chosen
    python -m benchmarks.guard --records benchmarks/results/guard_records.json

The runs are those of over_optimised_letters.py. Twenty optimise a reward model: ten one that is worse than those with
which the guard was tuned, ten at another learning rate. Twenty have the gold reward itself or a KL penalty. Which of
these are sound is told by their gold rewards. The guard reads the metrics of steps and evaluations, with 64 gold
labels an evaluation, or without. At the first trouble the run goes back: `kept` is the true gold reward of the version
it goes back to, smoothed over three evaluations, above its start, as a share of the run's gain. --out also writes the
records, which --records reads again, and the curves of proxy and gold against the KL.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from async_rl.config.guard import GuardConfig
from async_rl.guard.decision import Finding, Guard
from async_rl.guard.signals import SIGNALS
from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.tables import Table
from benchmarks.over_optimised_letters import EVERY, LettersRun, Record, train
from benchmarks.reward_curves import Curve, curve_table, draw

TUNING = (
    (LettersRun("300 comparisons", 0), 10),
    (LettersRun("KL penalty 0.3", 100, beta=0.3), 10),
    (LettersRun("gold itself", 200, is_gold=True), 10),
)
"""The first of some runs, whose seeds follow each other, and their number."""
JUDGED = (
    (LettersRun("100 comparisons", 1000, comparisons=100), 10),
    (LettersRun("lr 1.5e-3", 1100, lr=1.5e-3, steps=200), 10),
    (LettersRun("KL penalty 0.4, lr 1.5e-3", 1200, beta=0.4, lr=1.5e-3, steps=200), 10),
    (LettersRun("gold itself, lr 1.5e-3", 1300, is_gold=True, lr=1.5e-3, steps=200), 10),
)
CONFIG = GuardConfig(every_steps=EVERY)
"""The limits that are judged: those that a run has if it sets none."""
DIGITS = 5
"""The significant digits of the records."""


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The records of a run, and its true gold rewards, [evaluation], smoothed over three evaluations."""

    setting: LettersRun
    records: Sequence[Record]
    versions: Sequence[int]
    gold: Sequence[float]

    @property
    def gain(self) -> float:
        return max(self.gold) - self.gold[0]

    @property
    def is_over_optimised(self) -> bool:
        """Whether it gains something and has lost more than a tenth of it at the end."""
        return self.gain > 0.5 and self.kept(self.versions[-1]) < 0.9

    @property
    def falls_at(self) -> int:
        """The first version after the peak that has lost more than a tenth of the gain; the last one if none has."""
        peak = self.versions[int(np.argmax(self.gold))]
        return next((v for v in self.versions if v > peak and self.kept(v) < 0.9), self.versions[-1])

    def kept(self, version: int) -> float:
        """The share of the gain that a version has."""
        return (self.gold[self.versions.index(version)] - self.gold[0]) / self.gain if self.gain > 0 else 0.0


def made(setting: LettersRun, records: Sequence[Record]) -> RecordedRun:
    evaluated = [record for record in records if "true/gold" in record]
    raw = [record["true/gold"] for record in evaluated]
    parts = [raw[max(0, i - 1) : i + 2] for i in range(len(raw))]
    gold = [sum(part) / len(part) for part in parts]
    return RecordedRun(setting, records, [int(each["step"]) for each in evaluated], gold)


def findings(records: Iterable[Record], config: GuardConfig, has_gold: bool) -> list[Finding]:
    """Return what the guard finds in the records, with gold rewards or without."""
    guard, found = Guard(config), []
    for record in records:
        seen = {key: value for key, value in record.items() if has_gold or not key.startswith("eval/")}
        if finding := guard.add(int(record["step"]), seen):
            found.append(finding)
    return found


def first_trouble(found: Iterable[Finding]) -> Finding | None:
    """Return the first trouble among findings of one run."""
    return next((each for each in found if each.is_trouble), None)


def signal_versions(findings: Iterable[Finding]) -> dict[str, int]:
    """Return the version at which each signal is first beyond its limit, by name, in order."""
    first = dict[str, int]()
    for found in findings:
        first |= {name: found.version for name in found.beyond if name not in first}
    return first


@dataclass(frozen=True, slots=True)
class Verdicts:
    """The gain that the guard keeps in a set of runs, and its false alarms."""

    kept: Sequence[float]
    """The share of the gain that it keeps, of each over-optimised run."""
    sound: int
    """The number of sound runs."""
    false_alarms: int
    """The number of those in which it finds trouble."""

    @property
    def good(self) -> int:
        """The number of over-optimised runs that keep at least 0.9 of their gain."""
        return sum(share >= 0.9 for share in self.kept)

    @property
    def mean_kept(self) -> float:
        return sum(self.kept) / len(self.kept) if self.kept else math.nan


def verdicts(runs: Sequence[RecordedRun], config: GuardConfig, has_gold: bool) -> Verdicts:
    kept, false = list[float](), 0
    for run in runs:
        found = first_trouble(findings(run.records, config, has_gold))
        if run.is_over_optimised:
            kept.append(run.kept(max(0, found.back_to) if found else run.versions[-1]))
        else:
            false += found is not None
    return Verdicts(kept, len(runs) - len(kept), false)


def summary(runs: Sequence[RecordedRun], config: GuardConfig) -> str:
    """Return sentences: what the guard keeps and its false alarms, with gold labels and without, and what is lost."""
    lines = []
    for words, has_gold in (("with 64 gold labels an evaluation", True), ("without gold labels", False)):
        found = verdicts(runs, config, has_gold)
        lines.append(
            f"- {words}: {found.good} of {len(found.kept)} over-optimised runs keep at least 0.9 of their gain, "
            f"{found.mean_kept:.2f} in the mean; {found.false_alarms} false alarms in {found.sound} sound runs."
        )
    over_runs = [run for run in runs if run.is_over_optimised]
    lost = sum(run.kept(run.versions[-1]) for run in over_runs) / max(1, len(over_runs))
    return "\n".join([*lines, f"- without a guard: {lost:.2f} of the gain is left in the mean."])


def run_table(runs: Sequence[RecordedRun], config: GuardConfig) -> Table:
    header = ("run", "seed", "gold at the start", "at its peak", "at step", "at the end", "trouble with gold",
              "back to", "kept", "trouble without", "back to", "kept", "signals and their first steps")  # fmt: skip
    rows = []
    for run in runs:
        peak = max(range(len(run.gold)), key=run.gold.__getitem__)
        row = [run.setting.name + ("" if run.is_over_optimised else " (sound)"), str(run.setting.seed)]
        row += [f"{run.gold[0]:.2f}", f"{run.gold[peak]:.2f}", str(run.versions[peak]), f"{run.gold[-1]:.2f}"]
        with_gold, without = (findings(run.records, config, has_gold) for has_gold in (True, False))
        for found in map(first_trouble, (with_gold, without)):
            back = max(0, found.back_to) if found else run.versions[-1]
            row += [str(found.version) if found else "-", str(back) if found else "-", f"{run.kept(back):.2f}"]
        fired = signal_versions(with_gold)
        rows.append([*row, ", ".join(f"{name} {version}" for name, version in fired.items()) or "-"])
    return Table(header, rows, "Runs")


def signal_table(runs: Sequence[RecordedRun], config: GuardConfig) -> Table:
    """Return, for each signal, how far it goes in sound runs, how far it is where gold falls, and when it fires."""
    header = ("signal", "limit", "furthest in sound runs", "where gold has fallen by a tenth", "fires in sound runs",
              "in over-optimised ones", "median steps after that fall")  # fmt: skip
    over, sound = ([run for run in runs if run.is_over_optimised is kind] for kind in (True, False))
    found = {id(run): findings(run.records, config, has_gold=True) for run in runs}
    first = {key: signal_versions(of_run) for key, of_run in found.items()}
    rows = []
    for name, signal in SIGNALS.items():
        furthest = min if signal.is_floor else max
        values = {key: [(each.version, each.values[name]) for each in of_run if name in each.values]
                  for key, of_run in found.items()}  # fmt: skip
        extremes = [furthest(value for _, value in values[id(run)]) for run in sound if values[id(run)]]
        falls = [
            [value for version, value in values[id(run)] if version <= run.falls_at][-1:] for run in over
        ]  # fmt: skip
        fired = {key: versions.get(name) for key, versions in first.items()}
        late = [version - run.falls_at for run in over if (version := fired[id(run)]) is not None]
        rows.append([
            name, f"{signal.limit(config):g}", _spread(sorted(extremes, reverse=signal.is_floor)[-3:]),
            _spread(sorted(value for each in falls for value in each)), f"{_count(fired, sound)} of {len(sound)}",
            f"{_count(fired, over)} of {len(over)}", f"{np.median(late):+g}" if late else "-",
        ])  # fmt: skip
    return Table(header, rows, "Signals")


def _count(fired: dict[int, int | None], runs: Sequence[RecordedRun]) -> int:
    return sum(fired[id(run)] is not None for run in runs)


def _spread(values: Sequence[float]) -> str:
    """Return the smallest, the middle and the largest of sorted values."""
    return " / ".join(f"{values[place]:.2f}" for place in (0, len(values) // 2, -1)) if values else "-"


def curve_of(run: RecordedRun) -> Curve:
    """Return KL, proxy and true gold of each evaluation of a run."""
    evaluated = [record for record in run.records if "true/gold" in record]
    kl, proxy, gold = (np.array([each[key] for each in evaluated]) for key in ("true/kl", "eval/proxy", "true/gold"))
    return Curve(run.setting.kind, run.setting.seed, kl, proxy, gold)


def trained(groups: Iterable[tuple[LettersRun, int]]) -> list[RecordedRun]:
    """Return the runs of some groups, each with its own seed, with records of DIGITS digits."""
    return [
        made(replace(first, seed=first.seed + number), [{key: _rounded(each[key]) for key in each} for each in records])
        for first, count in groups for number, records in enumerate(train(first, count))
    ]  # fmt: skip


def write_records(runs: Sequence[RecordedRun], file: Path) -> None:
    """Write runs as JSON, a line for each: its setting, and the columns of its steps and of its evaluations."""
    lines = []
    for run in runs:
        kinds = {"steps": [each for each in run.records if "true/gold" not in each],
                 "evaluations": [each for each in run.records if "true/gold" in each]}  # fmt: skip
        columns = {
            kind: {key: [each[key] for each in records] for key in records[0]}
            for kind, records in kinds.items()
        }
        lines.append(json.dumps({"setting": asdict(run.setting), **columns}, separators=(",", ":")))
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def read_records(file: Path) -> list[RecordedRun]:
    """Return the runs that `write_records` has written; an evaluation stands after the step of its version."""
    runs = []
    for run in json.loads(file.read_text()):
        kinds = [
            [dict(zip(run[kind], values, strict=True)) for values in zip(*run[kind].values(), strict=True)]
            for kind in ("steps", "evaluations")
        ]
        records: list[Record] = sorted((each for kind in kinds for each in kind), key=lambda each: each["step"])
        runs.append(made(LettersRun(**run["setting"]), records))
    return runs


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def page_of(runs: Sequence[RecordedRun], config: GuardConfig) -> str:
    """Return the results in Markdown."""
    tables = [run_table(runs, config), signal_table(runs, config)]
    text = "".join(f"\n\n## {table.title}\n\n{table.markdown()}" for table in tables)
    curves = curve_table([curve_of(run) for run in runs]).markdown()
    return f"{summary(runs, config)}{text}\n\n## Proxy and gold\n\n{curves}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuning", action="store_true", help="the runs with which the limits were chosen")
    parser.add_argument("--records", type=Path, help="the file of a call with --out, in place of runs")
    parser.add_argument("--out", type=Path, help="write this file with .md and .png, and with _records.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = read_records(args.records) if args.records else trained(TUNING if args.tuning else JUDGED)
    said = " ".join(sys.argv[1:])
    page = f"# Guard\n\n`python -m benchmarks.guard {said}`, {machine_text()}.\n\n{page_of(runs, CONFIG)}"
    print(page)
    if args.out:
        args.out.with_suffix(".md").write_text(page)
        write_records(runs, args.out.with_name(f"{args.out.name}_records.json"))
        draw([curve_of(run) for run in runs], args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
