"""`async-rl plan`: what each bound would bring, which bound and which split of the devices to take, what will fit."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.errors import ConfigError
from benchmarks.cells import numbers
from benchmarks.prediction import Forecast, closed_form, simulated, sizes, stages, workload_of
from benchmarks.results import read_runs
from benchmarks.simulate import Workload
from benchmarks.sizing import Method, learner_memory, overlap_gain, transfer_seconds

WORTHWHILE = 0.02
"""A larger bound must shorten the step by more than this share to be recommended."""


@dataclass(frozen=True, slots=True)
class Plan:
    workload: Workload
    bounds: tuple[int, ...]
    closed: tuple[Forecast, ...]
    simulated: tuple[Forecast, ...]

    @property
    def best(self) -> int:
        """The smallest bound after which the simulated step gets hardly shorter."""
        shortest_s = min(forecast.step_s for forecast in self.simulated)
        enough = [forecast.step_s <= (1 + WORTHWHILE) * shortest_s for forecast in self.simulated]
        return self.bounds[enough.index(True)]


def make_plan(workload: Workload, bounds: Sequence[int]) -> Plan:
    return Plan(
        workload, tuple(bounds), tuple(closed_form(workload, bound) for bound in bounds),
        tuple(simulated(workload, bound) for bound in bounds),
    )


def measured_workload(folder: Path) -> Workload:
    """From a run directory or all bounds of a sweep. Raises ConfigError if nothing is there."""
    runs = read_runs(folder)
    workload = workload_of([stages(run) for run in runs], *sizes(runs[0]))
    if math.isnan(workload.group_mean_s):
        raise ConfigError(f"{folder} holds no durations of rollout groups (rollout/group_s): was it too short a run?")
    return workload


def answer(args: argparse.Namespace) -> str:
    """What the options of `async-rl plan` ask for. Raises ConfigError."""
    given = {
        field.name: value
        for field in dataclasses.fields(Workload)
        if (value := getattr(args, field.name, None)) is not None
    }
    parts = []
    if args.rollout_s and args.train_s:
        parts.append(describe_overlap(args.rollout_s, args.train_s))
    elif args.folder or given:
        workload = dataclasses.replace(measured_workload(args.folder) if args.folder else Workload(), **given)
        plan = make_plan(workload, numbers(args.staleness, "--staleness"))
        parts.append(describe_plan(plan))
        if args.devices:
            now = devices_now(args.now)
            parts.append(describe_splits(split_devices(workload, args.devices, plan.best, *now), plan.best))
    if args.params:
        parts.append(describe_memory(args.params, args.method, args.device_gb, args.link_gbps))
    if not parts:
        raise ConfigError(
            "plan needs a RUN_DIR, durations (--train-s 40 --group-s 60, or --rollout-s 60 --train-s 40), "
            "or --params 70e9"
        )
    return "\n\n".join(parts)


def devices_now(now: str) -> tuple[int, int]:
    learner, comma, rollout = now.partition(",")
    if not (comma and learner.isdecimal() and rollout.isdecimal() and int(learner) and int(rollout)):
        raise ConfigError(f"--now must be learner,rollout devices, e.g. 4,4; got {now!r}")
    return int(learner), int(rollout)


def describe_plan(plan: Plan) -> str:
    w = plan.workload
    lines = [
        f"Learner: {w.train_s:.3g} s to train a batch of {w.prompts_per_step} groups, {w.sync_s:.3g} s to push, "
        f"{w.handout_s:.3g} s to receive a batch.",
        f"Rollout: a group takes {w.group_mean_s:.3g} s alone and {w.load_s:.3g} s more for each other one in flight, "
        f"{w.concurrency} at most; standard deviation {w.group_cv:.0%}; {w.failed:.0%} are dropped.",
        "",
        "                  closed form                             simulation",
        "staleness.max  step, s  learner  rollout  staleness    step, s  learner  rollout  staleness  occupancy",
    ]
    for bound, closed, found in zip(plan.bounds, plan.closed, plan.simulated, strict=True):
        lines.append(
            f"{bound:13}  {closed.step_s:7.3g}  {closed.learner:7.1%}  {closed.rollout:7.1%}  {closed.staleness:9.2f}"
            f"    {found.step_s:7.3g}  {found.learner:7.1%}  {found.rollout:7.1%}  {found.staleness:9.2f}"
            f"  {found.occupancy:9.1%}"
        )
    best = plan.simulated[plan.bounds.index(plan.best)]
    lines += [
        "",
        f"Take staleness.max = {plan.best}: {plan.simulated[0].step_s / best.step_s:.2f} times the steps per hour of "
        f"staleness {plan.bounds[0]}, and a larger bound gains less than {WORTHWHILE:.0%} more.",
    ]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Split:
    learner_devices: int
    rollout_devices: int
    forecast: Forecast


def split_devices(workload: Workload, devices: int, bound: int, learner_now: int, rollout_now: int) -> list[Split]:
    """Every split of `devices`, shortest step first, each pool's speed in proportion to its devices: the learner's
    time shrinks, the rollout pool's slots grow and the load spreads over them.

    Args:
        learner_now, rollout_now: the devices that the workload's durations were measured with.
    """
    splits = []
    for learner_devices in range(1, devices):
        rollout_devices = devices - learner_devices
        share = rollout_devices / rollout_now
        scaled = dataclasses.replace(
            workload, train_s=workload.train_s * learner_now / learner_devices, load_s=workload.load_s / share,
            concurrency=max(1, int(workload.concurrency * share)),
        )
        splits.append(Split(learner_devices, rollout_devices, closed_form(scaled, bound)))
    return sorted(splits, key=lambda split: split.forecast.step_s)


def describe_splits(splits: Sequence[Split], bound: int) -> str:
    best = splits[0]
    lines = ["learner devices  rollout devices  step, s  learner  rollout"]
    for split in sorted(splits, key=lambda split: split.learner_devices):
        f, devices = split.forecast, f"{split.learner_devices:15}  {split.rollout_devices:15}"
        mark = "  best" if split is best else ""
        lines.append(f"{devices}  {f.step_s:7.3g}  {f.learner:7.1%}  {f.rollout:7.1%}{mark}")
    lines.append(
        f"At staleness.max = {bound} take {best.learner_devices} for the learner, {best.rollout_devices} for rollout."
    )
    return "\n".join(lines)


def describe_memory(parameters: float, method: Method, device_gb: float, link_gbps: float) -> str:
    """Memory of the learner by role, the fewest devices, and the time of one weight transfer."""
    memory = learner_memory(parameters, method, device_gb * 1e9)
    lines = [f"Learner memory, {parameters / 1e9:g} billion parameters, {method}, Adam in mixed precision (bf16):"]
    lines += [f"    {role:<14} {size / 1e9:9,.1f} GB" for role, size in memory.by_role.items()]
    lines.append(
        f"    {'together':<14} {memory.total_bytes / 1e9:9,.1f} GB: at least {memory.devices} x {device_gb:g} GB, "
        "activations and the rollout servers' copies not counted"
    )
    size = 2 * parameters
    lines.append(
        f"A push of {size / 1e9:,.3g} GB of bf16 weights over {link_gbps:g} Gb/s takes "
        f"{transfer_seconds(size, link_gbps * 1e9):.3g} s."
    )
    return "\n".join(lines)


def describe_overlap(rollout_s: float, train_s: float) -> str:
    gain = overlap_gain(rollout_s, train_s)
    return (
        f"Rollout {rollout_s:g} s and learning {train_s:g} s a step: in turn the learner works "
        f"{gain.learner_in_turn:.0%} of the time, with full overlap {gain.learner_overlapped:.0%}, "
        f"{gain.speedup:.2f} times the steps."
    )
