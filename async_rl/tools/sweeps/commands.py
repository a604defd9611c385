"""The command-line options of `async-rl sweep`, `report` and `plan`. Each command imports its modules when it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

AddCommand = Callable[[str, Callable[[argparse.Namespace], int], str, str], argparse.ArgumentParser]
"""Adds a command by its name, the function that makes its exit code, a sentence on it, and an example of its words."""

BOUNDS = "0,1,2,3,5,8,10"
BELOW = "1.25/8 is staleness.depth 1.25 below staleness.max 8"


def add_sweeps(add: AddCommand, add_config: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the commands sweep, report and plan; `add_config` adds the arguments CONFIG and key=value to a command."""
    sweep = add(
        "sweep", _sweep, "train at every combination of settings and seeds, and report",
        "quickstart.yaml --staleness 0,1,2 --seeds 3 run.steps=40",
    )
    add_config(sweep)
    _add_sweep_options(sweep)

    sentence = "make table, plots and the page report.html of a sweep or a run"
    report = add("report", _report, sentence, "runs/quickstart-sweep")
    report.add_argument("folder", type=Path, metavar="RUN_DIR")

    sentence = "predict the speed of each staleness bound by simulation"
    _add_plan_options(add("plan", _plan, sentence, "--train-s 40 --rollout-s 60"))


def _add_sweep_options(sweep: argparse.ArgumentParser) -> None:
    of_bounds = f"values of staleness.max; {BELOW} (default: %(default)s)"
    sweep.add_argument("--staleness", default=BOUNDS, help=of_bounds)
    sweep.add_argument("--seeds", type=int, default=3, help="runs of every combination (default: %(default)s)")
    sweep.add_argument("--first-seed", type=int, default=0, help="run.seed of the first run (default: %(default)s)")
    sweep.add_argument("--mode", choices=["bounded", "exact", "both"], help="staleness.mode (default: the config's)")
    sweep.add_argument("--correction", help="comma-separated: none,coupled,decoupled_tis (default: the config's)")
    sweep.add_argument("--axis", action="append", default=[], metavar="KEY=V,V", help="e.g. learner.lr=1e-4,3e-4")
    sweep.add_argument("--seconds", type=float, default=0.0, help="time for every cell, instead of run.steps")
    sweep.add_argument("--name", help="folder under run.dir (default: <run.name>-sweep)")
    sweep.add_argument("--max-cells", type=int, help="stop after so many cells; the same command continues")
    sweep.add_argument(
        "--parallel", default="1", metavar="N|auto",
        help="cells at once, each with its part of the GPUs, or without any of the cores; auto: as many as fit of the "
        "largest. 1 on a Ray cluster",
    )
    sweep.add_argument("--dry-run", action="store_true", help="print cells, places and time, start nothing")


def _add_plan_options(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("folder", nargs="?", type=Path, metavar="RUN_DIR", help="run or sweep with measured durations")
    plan.add_argument("--staleness", default=BOUNDS, help=f"as for sweep; {BELOW} (default: %(default)s)")
    seconds = plan.add_argument_group("durations in seconds; they replace the measured ones")
    seconds.add_argument("--train-s", type=float, help="training time of a batch")
    seconds.add_argument("--rollout-s", type=float, help="time to generate a batch on a fully loaded engine")
    seconds.add_argument("--sync-s", type=float, help="time of a weight push")
    seconds.add_argument("--group-s", type=float, dest="group_mean_s", help="time of a group that runs alone")
    seconds.add_argument("--load-s", type=float, help="time that each further group in flight adds to a group")
    seconds.add_argument("--cv", type=float, dest="group_cv", help="standard deviation of a group's time over its mean")
    seconds.add_argument("--concurrency", type=int, help="rollout.max_groups_in_flight of all workers")
    seconds.add_argument("--prompts-per-step", type=int)
    seconds.add_argument("--late", choices=["wait", "drop", "mask"], help="staleness.on_late")


def _sweep(args: argparse.Namespace) -> int:
    from async_rl.base.config.check import check
    from async_rl.base.config.loading import load_config
    from async_rl.tools.sweeps.cells import (
        CORRECTIONS,
        MODES,
        all_cells,
        key_axis,
        named_axis,
        seed_axis,
        staleness_axis,
    )
    from async_rl.tools.sweeps.sweep import Sweep, plan_of, run_and_report

    is_number = args.parallel.isdecimal() and int(args.parallel) > 0
    check(is_number or args.parallel == "auto", "--parallel", args.parallel, "1 or more, or auto")
    check(args.max_cells is None or args.max_cells > 0, "--max-cells", args.max_cells, "1 or more; without it all run")
    is_name = args.name is None or (Path(args.name).name == args.name and args.name not in ("", ".."))
    check(is_name, "--name", args.name, "the name of a folder in run.dir, without / (set run.dir)")
    axes = [staleness_axis(args.staleness), seed_axis(args.seeds, args.first_seed)]
    if args.mode:
        axes.append(named_axis("mode", "bounded,exact" if args.mode == "both" else args.mode, MODES))
    if args.correction:
        axes.append(named_axis("correction", args.correction, CORRECTIONS))
    axes += [key_axis(text) for text in args.axis]
    first = all_cells(axes, Path())[0]
    base = load_config(args.config, [*args.overrides, *first.overrides])  # without the axes it need not be valid
    folder = Path(base.run.dir) / (args.name or f"{base.run.name}-sweep")
    sweep = Sweep(
        config=args.config, overrides=tuple(args.overrides), axes=tuple(axes), folder=folder, seconds=args.seconds,
        max_cells=args.max_cells, parallel=int(args.parallel) if is_number else None,
    )
    if args.dry_run:
        print(plan_of(sweep), end="")
        return 0
    return run_and_report(sweep)


def _report(args: argparse.Namespace) -> int:
    from async_rl.tools.sweeps.report import write_report

    folder = args.folder.expanduser()
    print(f"{write_report(folder)}\n\n{folder}/report.html")
    return 0


def _plan(args: argparse.Namespace) -> int:
    from async_rl.tools.sweeps.plan import answer

    print(answer(args))
    return 0
