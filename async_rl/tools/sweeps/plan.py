"""`async-rl plan`: predicts the speed of each staleness bound by simulation, from measured or given durations."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.base.config.check import check
from async_rl.base.errors import ConfigError
from async_rl.tools.sweeps.cells import Bound, bounds_of, bounds_title
from async_rl.tools.sweeps.prediction import SIMULATED_STEPS, first_series, rules_of, stages, timed_steps, workload_of
from async_rl.tools.sweeps.results import read_runs
from async_rl.tools.sweeps.settings import Setting, settings_of
from async_rl.tools.sweeps.significance import recommendation
from async_rl.tools.sweeps.tables import Table
from buffer.simulate import Result, Workload, simulate

WORTHWHILE = 0.02
"""A larger bound must shorten the step by more than this share to be recommended."""
ABOVE_0 = ("train_s", "rollout_s", "group_mean_s", "concurrency", "prompts_per_step")
FROM_0 = ("sync_s", "load_s", "group_cv")
OPTIONS = {"group_mean_s": "--group-s", "group_cv": "--cv"}
"""The options that are not called as their values."""


@dataclass(frozen=True, slots=True)
class Plan:
    workload: Workload
    bounds: tuple[Bound, ...]
    results: tuple[Result, ...]

    @property
    def best(self) -> Bound:
        """The bound of the smallest depth whose step takes at most 2 % longer than the shortest step of all bounds."""
        shortest_s = min(result.step_s for result in self.results)
        enough = [result.step_s <= (1 + WORTHWHILE) * shortest_s for result in self.results]
        return self.bounds[enough.index(True)]


def answer(args: argparse.Namespace) -> str:
    """Return the text that `async-rl plan` prints for its options. Raises ConfigError if they can't be used.

    For a sweep it begins with the sweep's own recommendation, as what a step is worth is not simulated.
    """
    for name in (*ABOVE_0, *FROM_0):
        value, allowed = getattr(args, name), "above 0 and finite" if name in ABOVE_0 else "0 or more and finite"
        is_allowed = value is None or 0 < value < math.inf or (value == 0 and name in FROM_0)
        check(is_allowed, OPTIONS.get(name, f"--{name.replace('_', '-')}"), value, allowed)
    rows = settings_of(read_runs(args.folder)) if args.folder else []
    plan = describe_plan(make_plan(planned_workload(args, rows), bounds_of(args.staleness)))
    return f"Measured: {recommendation(rows)}\n\n{plan}" if len(rows) > 1 else plan


def make_plan(workload: Workload, bounds: Sequence[Bound]) -> Plan:
    """Return the plan: the simulated result of each bound, without bounds that would make the learner wait for ever.

    Raises:
        ConfigError: the learner would wait for ever at each of the bounds.
    """
    possible = tuple(bound for bound in bounds if workload.slot_limits.is_enough(bound.depth))
    check(
        bool(possible), "--staleness", ",".join(map(str, bounds)),
        f"{workload.slot_limits.smallest_depth:g} or more with {rules_text(workload)}",
    )
    results = (simulate(workload, bound.max, SIMULATED_STEPS, depth=bound.depth) for bound in possible)
    return Plan(workload, possible, tuple(results))


def measured_workload(rows: Sequence[Setting], folder: Path) -> Workload:
    """Return the workload to simulate, as measured in a run or over all bounds of a sweep's first series.

    Raises:
        ConfigError: the runs have no measured durations, or settings that the simulator does not cover.
    """
    runs = [run for row in first_series(rows) for run in row.runs if timed_steps(run)]
    if not runs:
        raise ConfigError(f"{folder} holds no run of several steps with staleness.mode=bounded, which plan simulates")
    workload = workload_of([stages(run) for run in runs], rules_of(runs[0]))
    if math.isnan(workload.group_mean_s):
        raise ConfigError(f"{folder} holds no durations of groups (rollout/group_s): was it too short a run?")
    return workload


def planned_workload(args: argparse.Namespace, rows: Sequence[Setting]) -> Workload:
    """Return the workload to simulate: the one measured in `rows` of RUN_DIR, with values replaced by options.

    Raises:
        ConfigError: the options are not enough for a workload, or contradict each other.
    """
    names = (field.name for field in dataclasses.fields(Workload))
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if args.rollout_s is not None and {"group_mean_s", "load_s"} & set(given):
        raise ConfigError("--rollout-s is the time of a whole batch: give it without --group-s and --load-s")
    if args.folder:
        workload = measured_workload(rows, args.folder)
    elif args.train_s is None or (args.rollout_s is None and "group_mean_s" not in given):
        raise ConfigError("plan needs a RUN_DIR, or --train-s 40 and one of --group-s 60 and --rollout-s 60")
    else:
        workload = Workload(sync_s=0.0)
    workload = dataclasses.replace(workload, **given)
    if args.rollout_s is None:
        return workload
    # A full engine takes as long for a batch however many groups are in flight together.
    group_s = args.rollout_s * (1 - workload.failed) / workload.prompts_per_step
    return dataclasses.replace(workload, group_mean_s=group_s, load_s=group_s)


def describe_plan(plan: Plan) -> str:
    w = plan.workload
    lines = [
        f"Learner: {w.train_s:.3g} s to train a batch of {w.prompts_per_step} groups, {w.sync_s:.3g} s to push, "
        f"{w.receive_s:.3g} s to receive a batch.",
        f"Rollout: a group takes {w.group_mean_s:.3g} s alone and {w.load_s:.3g} s more for each other one in flight, "
        f"{w.concurrency} at most; standard deviation {w.group_cv:.0%}; {w.failed:.0%} are dropped.",
    ]
    if rules := rules_text(w):
        lines.append(f"Rules: {rules}.")
    header = (
        bounds_title(plan.bounds), "step, s", "learner", "rollout", "staleness, mean",
        "groups in flight / max_groups_in_flight",
    )  # fmt: skip
    rows = [
        [
            str(bound), f"{result.step_s:.3g}", f"{result.utilisation:.1%}", f"{result.rollout:.1%}",
            f"{result.mean_staleness:.2f}", f"{result.in_flight:.1%}",
        ]
        for bound, result in zip(plan.bounds, plan.results, strict=True)
    ]  # fmt: skip
    lines += ["", Table(header, rows).markdown()]
    if smallest := w.slot_limits.smallest_depth:
        lines.append(f"Left out: depths below {smallest:g}, where the learner would wait for ever.")
    larger = (
        "larger ones were not tried" if plan.best == plan.bounds[-1]
        else f"a larger one, up to {plan.bounds[-1]}, gains less than {WORTHWHILE:.0%} more"
    )  # fmt: skip
    gain = plan.results[0].step_s / plan.results[plan.bounds.index(plan.best)].step_s
    depth = "" if plan.best.is_full else f" and staleness.depth = {plan.best.depth:g}"
    lines.append(
        f"For speed alone staleness.max = {plan.best.max}{depth} is enough: {gain:.2f} times the steps per hour of "
        f"staleness {plan.bounds[0]}, and {larger}. What a stale step teaches is not simulated; `async-rl sweep` "
        "measures it."
    )
    return "\n".join(lines)


def rules_text(workload: Workload) -> str:
    """Return as `key=value, ...` those settings of staleness, pushes and replay that differ from their defaults."""
    w, default = workload, Workload()
    settings = {
        "staleness.on_late": (w.late, default.late), "weight_sync.every_steps": (w.every_steps, default.every_steps),
        "weight_sync.on_update": ("drain" if w.drain else "", ""), "buffer.max_uses": (w.max_uses, default.max_uses),
        "buffer.fresh_fraction": (w.fresh_fraction, default.fresh_fraction),
    }  # fmt: skip
    return ", ".join(f"{key}={value}" for key, (value, usual) in settings.items() if value != usual)
