"""Measures what the guard is worth: how much of the gain it keeps in over-optimised runs, and its false alarms.

    python -m benchmarks.guard --out benchmarks/results/guard

The runs are those of over_optimised_letters.py. Ten optimise a reward model that is worse than the one with which the
guard was tuned, or at another learning rate; ten are sound: five have the gold reward itself, five a KL penalty. Which
of these are sound is told by their gold rewards. The guard reads the metrics of steps and evaluations, with 64 gold
labels an evaluation, or without. At the first trouble the run goes back: `kept` is the true gold reward of the version
it goes back to, smoothed over three evaluations, above its start, as a share of the run's gain. --tuning runs the ones
with which limits were chosen. Records in the folder --work are used again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from async_rl.config.guard import GuardConfig
from async_rl.guard.decision import Finding, Guard
from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.tables import Table, write_page
from benchmarks.over_optimised_letters import EVERY, LettersRun, Record, supervised, train

TUNING = (
    *(LettersRun("300 comparisons", seed) for seed in range(4)),
    *(LettersRun("KL penalty 0.3", seed, beta=0.3) for seed in range(10, 13)),
    *(LettersRun("gold itself", seed, is_gold=True) for seed in range(20, 22)),
)
JUDGED = (
    *(LettersRun("150 comparisons", seed, comparisons=150) for seed in range(100, 105)),
    *(LettersRun("lr 1.2e-3", seed, lr=1.2e-3, steps=60) for seed in range(110, 115)),
    *(LettersRun("KL penalty 0.4, lr 1e-3", seed, beta=0.4, lr=1e-3, steps=60) for seed in range(120, 125)),
    *(LettersRun("gold itself, lr 1e-3", seed, is_gold=True, lr=1e-3, steps=60) for seed in range(130, 135)),
)


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

    def kept(self, version: int) -> float:
        """The share of the gain that a version has."""
        return (self.gold[self.versions.index(version)] - self.gold[0]) / self.gain if self.gain > 0 else 0.0


def made(setting: LettersRun, records: Sequence[Record]) -> RecordedRun:
    evaluated = [record for record in records if "true/gold" in record]
    raw = [record["true/gold"] for record in evaluated]
    parts = [raw[max(0, i - 1) : i + 2] for i in range(len(raw))]
    gold = [sum(part) / len(part) for part in parts]
    return RecordedRun(setting, records, [int(each["step"]) for each in evaluated], gold)


def first_trouble(records: Sequence[Record], config: GuardConfig, has_gold: bool) -> Finding | None:
    """Return the first trouble that the guard finds in the records."""
    guard = Guard(config)
    for record in records:
        seen = {key: value for key, value in record.items() if has_gold or not key.startswith("eval/")}
        found = guard.add(int(record["step"]), seen)
        if found and found.is_trouble:
            return found
    return None


def signal_versions(records: Sequence[Record], config: GuardConfig) -> dict[str, int]:
    """Return the version at which each signal is first beyond its limit, by name, in order."""
    guard, first = Guard(config), dict[str, int]()
    for record in records:
        if found := guard.add(int(record["step"]), record):
            first |= {name: found.version for name in found.beyond if name not in first}
    return first


def verdicts(runs: Sequence[RecordedRun], config: GuardConfig, has_gold: bool) -> tuple[int, int, float, int, int]:
    """Return (over-optimised runs, those that keep 0.9 of the gain, mean share kept, sound runs, false alarms)."""
    kept, false = [], 0
    for run in runs:
        found = first_trouble(run.records, config, has_gold)
        if run.is_over_optimised:
            kept.append(run.kept(max(0, found.back_to) if found else run.versions[-1]))
        else:
            false += found is not None
    return len(kept), sum(k >= 0.9 for k in kept), sum(kept) / max(1, len(kept)), len(runs) - len(kept), false


def summary(runs: Sequence[RecordedRun], config: GuardConfig) -> str:
    lines = []
    for words, has_gold in (("with 64 gold labels an evaluation", True), ("without gold labels", False)):
        over, good, mean, sound, false = verdicts(runs, config, has_gold)
        lines.append(
            f"- {words}: {good} of {over} over-optimised runs keep at least 0.9 of their gain, {mean:.2f} in the "
            f"mean; {false} false alarms in {sound} sound runs."
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
        for has_gold in (True, False):
            found = first_trouble(run.records, config, has_gold)
            back = max(0, found.back_to) if found else run.versions[-1]
            row += [str(found.version) if found else "-", str(back) if found else "-", f"{run.kept(back):.2f}"]
        fired = signal_versions(run.records, config)
        rows.append([*row, ", ".join(f"{name} {version}" for name, version in fired.items()) or "-"])
    return Table(header, rows)


def recorded(settings: Sequence[LettersRun], work: Path) -> list[RecordedRun]:
    """Return the runs of the settings; those that `work` does not hold are made."""
    work.mkdir(parents=True, exist_ok=True)
    start, runs = None, []
    for setting in settings:
        file = work / f"{setting.name.replace(' ', '-')}.{setting.seed}.json"
        if not file.is_file():
            start = start or supervised()
            began_s = time.process_time()
            records = train(setting, start)
            file.write_text(json.dumps({"setting": asdict(setting), "records": records}))
            print(f"{file.name}: {time.process_time() - began_s:.1f} CPU s", flush=True)
        runs.append(made(setting, json.loads(file.read_text())["records"]))
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuning", action="store_true", help="the runs with which the limits were chosen")
    parser.add_argument("--first", type=int, help="only so many of the runs, for a try")
    parser.add_argument("--work", type=Path, default=Path("runs/guard"), help="folder for the records")
    parser.add_argument("--out", type=Path, help="write this file with .md and .json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = GuardConfig(every_steps=EVERY)
    runs = recorded((TUNING if args.tuning else JUDGED)[: args.first], args.work)
    table = run_table(runs, config)
    said = " ".join(sys.argv[1:])
    page = f"# Guard\n\n`python -m benchmarks.guard {said}`, {machine_text()}.\n\n{summary(runs, config)}\n\n"
    page += table.markdown()
    if args.out:
        write_page(args.out, page, {"header": table.header, "rows": table.rows})
    else:
        print(page)


if __name__ == "__main__":
    main()
