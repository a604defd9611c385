"""Every preset from the same warm-started model: held-out accuracy at the start and at the end, over seeds.

    python -m benchmarks.presets configs/quickstart.yaml

One table in benchmarks/results/presets.md, with the numbers of every run in presets.json. Finished runs are kept under
run.dir, so that the same command continues; --max-cells stops after so many.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from async_rl.config.loading import load_config
from async_rl.config.presets import PRESETS
from benchmarks.cells import SEED, Axis, seed_axis
from benchmarks.machine import describe_machine
from benchmarks.results import Run, read_runs
from benchmarks.statistics import estimate, welch
from benchmarks.sweep import Sweep, run_sweep

PRESET = "preset"
WITH_CRITIC = ("critic.lr=1e-3", "critic.warmup_steps=10")
"""A tiny critic learns fast, and the policy waits for it."""
BELOW_GREEDY = ("learner.lr=1e-4",)
"""ReMax: most sampled answers are worse than the greedy one, so nearly all advantages are negative. At the quickstart's
3e-4 one of three seeds collapsed within twenty steps (0.06 at the end; the others 0.75 and 0.74).
"""
BASE = ("rollout.engine=hf", "run.steps=200", "learner.decay_fraction=0", "eval.samples=4")


def preset_axis(names: Sequence[str]) -> Axis:
    """Each preset with what it needs beside it."""
    return Axis(PRESET, {name: (f"algorithm.preset={name}", *_extras(name)) for name in names})


def _extras(name: str) -> tuple[str, ...]:
    if name == "remax":
        return BELOW_GREEDY
    return WITH_CRITIC if PRESETS[name].get("advantage") in ("gae", "vtrace") else ()


def presets_table(runs: Sequence[Run]) -> str:
    """A row a preset: accuracies and their gain over the seeds, with the p-value of the gain against none."""
    lines = [
        "| preset | seeds | accuracy, start | accuracy, end | gain | p (no gain) | ESS/N | truncated | minutes a run |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, same in by_label(runs, PRESET).items():
        starts, ends = [run.evals[0][2] for run in same], [run.evals[-1][2] for run in same]
        gains = [run.improvement for run in same]
        ess, truncated = (
            estimate([run.mean(key) for run in same]).mean for key in ("offpolicy/ess", "offpolicy/truncated_fraction")
        )
        cells = [
            str(len(same)), estimate(starts).text("{:.3f}"), estimate(ends).text("{:.3f}"),
            estimate(gains).text("{:+.3f}"), f"{welch(ends, starts).p_value:.2g}", f"{ess:.3f}", f"{truncated:.2%}",
            f"{estimate([float(run.summary['seconds']) / 60 for run in same]).mean:.1f}",
        ]  # fmt: skip
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def by_label(runs: Sequence[Run], axis: str) -> dict[str, list[Run]]:
    """Runs by their level on an axis, in the order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.labels[axis], []).append(run)
    return groups


def run_table(
    sweep: Sweep, target: Path, title: str, table: Callable[[Sequence[Run]], str], order: Sequence[str], axis: str
) -> int:
    """Run what is left of the sweep, write the table of what is finished; returns the exit code."""
    progress = run_sweep(sweep)
    for name, error in progress.failed.items():
        print(f"failed: {name}: {error}", file=sys.stderr)
    if progress.seconds:
        runs = sorted(read_runs(sweep.folder), key=lambda run: (order.index(run.labels[axis]), run.labels[SEED]))
        command = shlex.join(["python", "-m", *_module_and_arguments()])
        machine = ", ".join(f"{key} {value}" for key, value in describe_machine().items())
        text = f"# {title}\n\n    {command}\n\nOn {machine}.\n\n{table(runs)}"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.with_suffix(".md").write_text(text)
        target.with_suffix(".json").write_text(json.dumps([_plain(run) for run in runs], indent=2) + "\n")
        print(text)
    if progress.pending:
        print(f"{len(progress.pending)} of {len(progress.cells)} runs are left: the same command continues")
    return 1 if progress.failed else 0


def _module_and_arguments() -> list[str]:
    return [f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]


def _plain(run: Run) -> dict[str, Any]:
    return {"labels": run.labels, "evals": run.evals, "values": run.values(), "summary": run.summary}


def parser_of(description: str | None, seeds: int) -> argparse.ArgumentParser:
    """The arguments that these benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--max-cells", type=int, default=0, help="stop after so many runs; the same command continues")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser


def main() -> int:
    parser = parser_of(__doc__, seeds=3)
    parser.add_argument("--presets", default=",".join(PRESETS), help="comma separated (default: all)")
    arguments = parser.parse_intermixed_args()
    names = arguments.presets.split(",")
    overrides = (*BASE, *arguments.overrides)
    sweep = Sweep(
        config=arguments.config, overrides=overrides, axes=(preset_axis(names), seed_axis(arguments.seeds, 0)),
        folder=Path(load_config(arguments.config, overrides).run.dir) / "presets", max_cells=arguments.max_cells,
    )
    return run_table(
        sweep, arguments.out / "presets", "Presets on the quickstart task", presets_table, names, PRESET
    )


if __name__ == "__main__":
    sys.exit(main())
