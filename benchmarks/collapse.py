"""Measures how early the alarms notice that a run collapses, and how often they are false, on runs of seconds.

    python -m benchmarks.collapse runs --work runs/collapse --out benchmarks/results/collapse
    python -m benchmarks.collapse judge benchmarks/results/collapse

`runs` makes the runs of collapsing_runs.py and writes the metrics that alarms read into tuning.json and judged.json.
`judge` replays them, with the present limits, and writes a page beside them. The limits were chosen with the tuning
runs alone; the settings of the judged ones were written down before any of these was made.

Which runs collapse is told by the true reward, which is that of the answers of each version: those that end with less
than half of what they had gained, which must be 0.2 or more. A run that had gained less and ends with less than half of
the reward of its start only fell; one that was below half and recovered is not sound either.

Half is lost at a step, exactly: the record of step t is written once version t is made, and its true reward is that of
version t - 1, the newest that has given answers by then. That series is smoothed by the median of the five steps
around each, which keeps the step of a fall that lasts. Half is lost at the first step after the best one whose smoothed
reward is below the middle of start and best. An alarm is before that if it stands in the record of an earlier step:
then no answer of a version that has lost half was scored. It comes at the same step if it stands in the very record
that shows the loss first. Only the former is noticed; both are counted. An alarm that comes more than a window before
the best reward is a false one: it would have ended the run before its gain.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from async_rl.config.alarms import AlarmsConfig
from async_rl.guard.collapse import KEYS
from async_rl.guard.collapse_watch import CollapseFinding, CollapseWatch
from async_rl.sweeps.machine import machine_text
from async_rl.sweeps.tables import Table, write_page
from benchmarks.collapse_settings import JUDGED, TUNING, mechanism
from benchmarks.collapsing_runs import Record, WordsRun, supervised, train

KEPT = (*KEYS, "staleness/mean", "true/reward")
"""The metrics that are kept of a run."""
SMOOTHED = 5
GAIN = 0.2
"""A run has gained something if its reward, smoothed, has risen by so much."""


@dataclass(frozen=True, slots=True)
class WordsRecord:
    """The metrics of a run, step by step, and what became of its reward."""

    setting: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def rewards(self) -> list[float]:
        """The true reward at each step, smoothed: the median of the steps around it."""
        raw, half = [record["true/reward"] for record in self.records], SMOOTHED // 2
        parts = (raw[max(0, place - half) : place + half + 1] for place in range(len(raw)))
        return [statistics.median(part) for part in parts]

    @property
    def start(self) -> float:
        """The reward of version 0, which is not smoothed: a run may collapse in its first steps."""
        return self.records[0]["true/reward"]

    @property
    def best(self) -> int:
        """The step with the best reward."""
        rewards = self.rewards
        return 1 + max(range(len(rewards)), key=rewards.__getitem__)

    @property
    def gain(self) -> float:
        """How much the reward has risen from the start to its best."""
        return self.rewards[self.best - 1] - self.start

    @property
    def half_lost(self) -> int | None:
        """The first step after the best one at which half is lost; None: it is not at the end."""
        rewards = self.rewards
        least = half_of(rewards[self.best - 1], self.start)
        below = [step for step in range(self.best, len(rewards) + 1) if rewards[step - 1] < least]
        return below[0] if rewards[-1] < least else None

    @property
    def kind(self) -> str:
        """`collapsed`, `fell`, which is a collapse of what had gained little, `recovered` or `sound`."""
        if self.half_lost is not None:
            return "collapsed" if self.gain >= GAIN else "fell"
        rewards = self.rewards
        highest = itertools.accumulate(rewards, max)
        dips = any(reward < half_of(best, self.start) for reward, best in zip(rewards, highest, strict=True))
        return "recovered" if dips else "sound"

    def kept(self, version: int) -> float:
        """Return the share of the gain that a version has."""
        rewards = self.rewards
        return (rewards[min(version, len(rewards) - 1)] - self.start) / self.gain if self.gain > 0 else 1.0


def half_of(best: float, start: float) -> float:
    """Return the reward at which half of a gain is lost, or half of the start where the gain is small."""
    return (best + start) / 2 if best - start >= GAIN else start / 2


def findings(record: WordsRecord, config: AlarmsConfig) -> Iterator[CollapseFinding]:
    """Yield the findings with new alarms, in order."""
    return (found for found in all_findings(record, config) if found.new)


def all_findings(record: WordsRecord, config: AlarmsConfig) -> Iterator[CollapseFinding]:
    """Yield the finding of each step from the end of the first window on."""
    watch = CollapseWatch(config, right_above=1.0)
    for each in record.records:
        if found := watch.add(int(each["step"]), each):
            yield found


def timing(record: WordsRecord, config: AlarmsConfig) -> str:
    """Return when the first alarm comes, counted from the step at which half is lost; `too early`: before the gain."""
    first, lost = next(findings(record, config), None), record.half_lost
    if first is None or lost is None:
        return "never" if first is None else "-"
    if first.version < record.best - config.window_steps:
        return "too early"
    return "before" if first.version < lost else "at the same step" if first.version == lost else "late"


def first_steps(record: WordsRecord, config: AlarmsConfig) -> dict[str, int]:
    """Return the step at which each alarm comes first, by name, in order."""
    first: dict[str, int] = {}
    for found in findings(record, config):
        first |= {name: found.version for name in found.new if name not in first}
    return first


def verdict(records: Sequence[WordsRecord], config: AlarmsConfig) -> dict[str, float]:
    """Return the numbers of collapses, of those noticed, of sound runs, and of those with an alarm; and what is kept.

    `kept` is the mean share of the gain that the version has to which alarms.action stop goes back.
    """
    collapses = [record for record in records if record.kind == "collapsed"]
    sound = [record for record in records if record.kind == "sound"]
    fell = [record for record in records if record.kind == "fell"]
    kept = [record.kept(found.back_to) for record in collapses if (found := next(findings(record, config), None))]
    timings = Counter(timing(record, config) for record in collapses)
    return {
        "collapses": len(collapses), "noticed": timings["before"], "at the same step": timings["at the same step"],
        "late": timings["late"], "too early": timings["too early"],
        "sound": len(sound), "false": sum(any(findings(record, config)) for record in sound),
        "fell": len(fell), "fell, with an alarm": sum(any(findings(record, config)) for record in fell),
        "recovered": len(records) - len(collapses) - len(sound) - len(fell),
        "kept": sum(kept) / max(1, len(kept)),
    }  # fmt: skip


def mechanism_table(records: Sequence[WordsRecord], config: AlarmsConfig) -> Table:
    """Return, for each mechanism, how many of its runs collapsed, and when the first alarm came."""
    rows = []
    for name in dict.fromkeys(mechanism(str(record.setting["name"])) for record in records):
        found = verdict([each for each in records if mechanism(str(each.setting["name"])) == name], config)
        if found["collapses"]:
            keys = ("collapses", "noticed", "at the same step", "late", "too early")
            rows.append([name, *(str(int(found[key])) for key in keys)])
    return Table(("collapse by", "runs", "before half is lost", "at the same step", "late", "too early"), rows)


def run_table(records: Sequence[WordsRecord], config: AlarmsConfig) -> Table:
    header = ("run", "kind", "seed", "lr", "staleness", "reward at the start", "at its best", "at step", "at the end",
              "half lost at", "alarms and their first steps", "first alarm", "kept by stop")  # fmt: skip
    rows = []
    for record in records:
        setting, rewards, first = record.setting, record.rewards, next(findings(record, config), None)
        fired = ", ".join(f"{name} {step}" for name, step in first_steps(record, config).items()) or "-"
        lost, noticed = record.half_lost, timing(record, config)
        if record.kind not in ("collapsed", "fell"):
            noticed = "-" if first is None else "false" if record.kind == "sound" else "dip"
        rows.append([
            setting["name"], record.kind, str(setting["seed"]), f"{setting['lr']:g}", str(setting["staleness"]),
            f"{record.start:.2f}", f"{rewards[record.best - 1]:.2f}", str(record.best), f"{rewards[-1]:.2f}",
            "-" if lost is None else str(lost), fired, noticed,
            f"{record.kept(first.back_to):.2f}" if first else "-",
        ])  # fmt: skip
    return Table(header, rows)


def summary(records: Sequence[WordsRecord], config: AlarmsConfig) -> str:
    found = {key: value if key == "kept" else int(value) for key, value in verdict(records, config).items()}
    return (
        f"{found['noticed']} of {found['collapses']} collapses are noticed before half of the gain is lost, "
        f"{found['at the same step']} at the same step, {found['late']} later; {found['too early']} have a false alarm "
        f"before their gain, and that is the first. {found['false']} of {found['sound']} sound runs have an alarm. "
        f"Of the other runs, {found['recovered']} have recovered, and {found['fell']} fell before they had gained "
        f"{GAIN:g}, {found['fell, with an alarm']} of them with an alarm. In a collapse, the version to which "
        f"alarms.action stop goes back has {found['kept']:.2f} of the gain in the mean."
    )


def read_records(file: Path) -> list[WordsRecord]:
    """Return the runs of a file that `write_records` has written."""
    runs = []
    for each in json.loads(file.read_text()):
        columns = each["metrics"]
        steps = range(len(columns["true/reward"]))
        records = [{"step": step + 1.0, **{k: v[step] for k, v in columns.items()}} for step in steps]
        runs.append(WordsRecord(each["setting"], records))
    return runs


def write_records(runs: Sequence[tuple[WordsRun, Sequence[Record]]], file: Path) -> None:
    """Write the kept metrics of runs, a list for each metric, to four digits."""
    kept = [
        {
            "setting": asdict(setting),
            "metrics": {key: [float(f"{record[key]:.4g}") for record in records] for key in KEPT},
        }
        for setting, records in runs
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("[\n" + ",\n".join(json.dumps(each) for each in kept) + "\n]\n")


def made(setting: WordsRun, work: Path) -> list[Record]:
    """Return the metrics of a run; it is made unless `work` holds them."""
    file = work / f"{setting.name.replace(',', '').replace(' ', '-')}.{setting.seed}.json"
    if not file.is_file():
        torch.set_num_threads(1)
        began_s = time.process_time()
        file.write_text(json.dumps(list(train(setting, supervised(setting, work)))))
        print(f"{file.name}: {time.process_time() - began_s:.1f} CPU s", flush=True)
    records: list[Record] = json.loads(file.read_text())
    return records


def make_runs(work: Path, out: Path, processes: int) -> None:
    work.mkdir(parents=True, exist_ok=True)
    for setting in {(each.rule, each.letters): each for each in (*TUNING, *JUDGED)}.values():
        supervised(setting, work)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.collapsing_runs"])
    with ProcessPoolExecutor(processes, context) as pool:
        for name, settings in (("tuning", TUNING), ("judged", JUDGED)):
            records = list(pool.map(partial(made, work=work), settings))
            write_records(list(zip(settings, records, strict=True)), out / f"{name}.json")


def judge(folder: Path) -> None:
    config = AlarmsConfig()
    page = f"# Collapses\n\n`python -m benchmarks.collapse {' '.join(sys.argv[1:])}`, {machine_text()}.\n\n"
    numbers = {}
    titles = {"judged": "Judged runs", "tuning": "Runs with which the limits were chosen"}
    for name, words in titles.items():
        if not (folder / f"{name}.json").is_file():
            continue
        records = read_records(folder / f"{name}.json")
        page += f"## {words}\n\n{summary(records, config)}\n\n"
        page += f"{mechanism_table(records, config).markdown()}\n{run_table(records, config).markdown()}\n"
        numbers[name] = verdict(records, config)
    write_page(folder / "alarms", page, numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("runs", help="make the runs that --work does not hold, and write their metrics to --out")
    runs.add_argument("--work", type=Path, default=Path("runs/collapse"))
    runs.add_argument("--out", type=Path, default=Path("benchmarks/results/collapse"))
    runs.add_argument("--processes", type=int, default=2)
    commands.add_parser("judge", help="replay the metrics in a folder").add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.command == "runs":
        make_runs(args.work, args.out, args.processes)
    else:
        judge(args.folder)


if __name__ == "__main__":
    main()
