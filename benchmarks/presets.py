"""Train with every algorithm preset from the same warm-started model, over seeds, and report.

    python -m benchmarks.presets configs/quickstart.yaml

This is a sweep whose axis sets each preset with the few keys that it needs. The report (table.md, runs.csv,
report.html) is in the folder `presets` of run.dir. Finished runs are kept: the same command continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from async_rl.config.loading import load_config
from async_rl.config.presets import PRESETS
from benchmarks.cells import Axis, seed_axis
from benchmarks.sweep import Sweep, run_and_report

WITH_CRITIC = ("critic.lr=1e-3", "critic.warmup_steps=10")
"""A tiny critic learns fast, and the policy waits for it."""
REMAX = ("learner.lr=1e-4",)
"""Most sampled answers are worse than the greedy one, so nearly all advantages of ReMax are negative. At the
quickstart's 3e-4 one of three seeds collapsed within twenty steps (0.06 at the end; the others 0.75 and 0.74).
"""
BASE = ("rollout.engine=hf", "run.steps=200", "learner.decay_fraction=0", "eval.samples=4")


def preset_axis(names: Sequence[str]) -> Axis:
    """An axis with a level for each preset."""
    return Axis("preset", {name: (f"algorithm.preset={name}", *_needs(name)) for name in names})


def _needs(name: str) -> tuple[str, ...]:
    if name == "remax":
        return REMAX
    return WITH_CRITIC if PRESETS[name].get("advantage") in ("gae", "vtrace") else ()


def make_parser(description: str | None, seeds: int) -> argparse.ArgumentParser:
    """Arguments of a benchmark that is a sweep."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--max-cells", type=int, default=0, help="stop after so many runs; the same command goes on")
    return parser


def run_axis(arguments: argparse.Namespace, base: Sequence[str], axis: Axis, name: str) -> int:
    """Sweep one axis and the seeds in the folder `name` of run.dir; returns the exit code."""
    overrides = (*base, *arguments.overrides)
    folder = Path(load_config(arguments.config, overrides).run.dir) / name
    axes = (axis, seed_axis(arguments.seeds, 0))
    return run_and_report(
        Sweep(
            config=arguments.config, overrides=overrides, axes=axes, folder=folder, max_cells=arguments.max_cells
        )
    )  # fmt: skip


def main() -> int:
    parser = make_parser(__doc__, seeds=3)
    parser.add_argument("--presets", default=",".join(PRESETS), help="comma-separated (default: all)")
    arguments = parser.parse_intermixed_args()
    return run_axis(arguments, BASE, preset_axis(arguments.presets.split(",")), "presets")


if __name__ == "__main__":
    sys.exit(main())
