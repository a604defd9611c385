"""Measures what held-out evaluations cost training: a run without any, with them beside it, and on a server of theirs.

    async-rl sft configs/sweep_agent_cpu.yaml
    python -m benchmarks.evaluation_cost configs/sweep_agent_cpu.yaml --out benchmarks/results/evaluation_cost

In each round every kind of run is made once, in turn, all with the seed of the round. Speeds are of the steps after the
first, in which all of the evaluations of the first kinds begin; those at the start and at the end of a run are not in
them. A cost is the share of the time that the runs without evaluations, of the same round, do not need. A kind that
this host refuses, as it has no core for a server more, is left out, and the page says why.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from async_rl.base.telemetry.metrics import read_metrics
from async_rl.tools.sweeps.statistics import estimate
from async_rl.tools.sweeps.tables import Table
from benchmarks.marked_command import MarkedCommand
from benchmarks.page import machine_text, write_page

KINDS: Mapping[str, Sequence[str]] = {
    "none": ("eval.every_steps=0",),
    "beside training": (),
    "beside training, pinned": ("eval.pin_version=true",),
    "on a server of its own": ("placement.eval.servers=1",),
}
"""The settings of each kind of run."""
REFUSED = 2
"""The exit status of a command whose settings can't work."""


@dataclass(frozen=True, slots=True)
class EvaluationRun:
    """The time that one run took, and its evaluations."""

    kind: str
    seed: int
    seconds: float
    """The time from the end of the first step to that of the last."""
    evaluations: int
    """The evaluations that ended beside training."""


def measured(kind: str, seed: int, run_dir: Path) -> EvaluationRun:
    """Return what a run that has ended took."""
    records = list(read_metrics(run_dir / "metrics.jsonl"))
    ends = [float(each["time/since_first_step_s"] or 0.0) for each in records if "time/since_first_step_s" in each]
    last = max(int(each["step"] or 0) for each in records)
    beside = [each for each in records if "eval/accuracy" in each and 0 < int(each["step"] or 0) < last]
    return EvaluationRun(kind, seed, max(ends), len(beside))


def train(kind: str, seed: int, words: Sequence[str], runs: Path, timeout_s: float) -> EvaluationRun | str:
    """Train with the settings of a kind; returns the text of the refusal if they can't work on this host.

    Raises:
        RuntimeError: the run failed; the message has the end of its output.
    """
    name = f"{kind.replace(', ', '-').replace(' ', '-')}-{seed}"
    settings = [f"run.dir={runs}", f"run.name={name}", f"run.seed={seed}", "logging.wandb=disabled", *KINDS[kind]]
    command = MarkedCommand(["train", *words, *settings], runs / f"{name}.log")
    try:
        code = command.wait(timeout_s)
    finally:
        command.kill()
    if code == REFUSED:
        return command.text().strip()
    if code:
        raise RuntimeError(f"the run {name} ended with {code}:\n{command.text()[-3000:]}")
    return measured(kind, seed, runs / name)


def costs(runs: Sequence[EvaluationRun], kind: str) -> list[float]:
    """Return, for each seed, the share of the time of a kind of run that the run without evaluations does not need."""
    without = {run.seed: run.seconds for run in runs if run.kind == "none"}
    return [1 - without[run.seed] / run.seconds for run in runs if run.kind == kind]


def table_of(runs: Sequence[EvaluationRun]) -> Table:
    rows = []
    for kind in dict.fromkeys(run.kind for run in runs):
        chosen = [run for run in runs if run.kind == kind]
        cost = costs(runs, kind)
        rows.append([
            kind, f"{statistics.fmean(run.seconds for run in chosen):.1f}",
            f"{statistics.fmean(run.evaluations for run in chosen):.1f}",
            "-" if kind == "none" else estimate(cost).text("{:.1%}"),
        ])  # fmt: skip
    return Table(("evaluations", "seconds", "evaluations of a run", "cost, share of the time"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a configuration with an evaluation every few steps")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="the longest time of one run")
    parser.add_argument("--out", type=Path, required=True, help="the page's and the numbers' file, without a suffix")
    args = parser.parse_args()
    runs, refusals = [], dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="evaluation-cost-") as folder:
        for seed in range(args.rounds):
            for kind in [kind for kind in KINDS if kind not in refusals]:
                found = train(kind, seed, [args.config, *args.overrides], Path(folder), args.timeout_s)
                print(found, flush=True)
                if isinstance(found, str) and kind == "none":
                    sys.exit(f"the configuration itself is refused, so nothing is measured: {found}")
                if isinstance(found, str):
                    refusals[kind] = found
                else:
                    runs.append(found)
    text = f"`python -m benchmarks.evaluation_cost {' '.join(sys.argv[1:])}`, {machine_text()}."
    left_out = "".join(f"\nNot measured: {kind}. {reason}\n" for kind, reason in refusals.items())
    page = f"# What held-out evaluations cost training\n\n{text}\n\n{table_of(runs).markdown()}{left_out}"
    write_page(args.out, page, [asdict(run) for run in runs])


if __name__ == "__main__":
    main()
