"""`async-rl plan`: what each bound would bring, which bound and which split of the devices to take, what will fit."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.config.check import check
from async_rl.errors import ConfigError
from benchmarks.cells import numbers
from benchmarks.prediction import Forecast, closed_form, first_series, rules_of, simulated, stages, workload_of
from benchmarks.results import read_runs, rows_of
from benchmarks.simulate import Workload
from benchmarks.sizing import Method, learner_memory, overlap_gain, transfer_seconds

WORTHWHILE = 0.02
"""A larger bound must shorten the step by more than this share to be recommended."""


ABOVE_0 = {
    "train_s": "--train-s", "rollout_s": "--rollout-s", "group_mean_s": "--group-s", "concurrency": "--concurrency",
    "prompts_per_step": "--prompts-per-step", "params": "--params", "device_gb": "--device-gb",
    "link_gbps": "--link-gbps",
}  # fmt: skip
FROM_0 = {"sync_s": "--sync-s", "load_s": "--load-s", "group_cv": "--cv"}


@dataclass(frozen=True, slots=True)
class Plan:
    workload: Workload
    bounds: tuple[int, ...]
    closed: tuple[Forecast | None, ...]
    """None where the closed form does not cover the workload's rules."""
    simulated: tuple[Forecast, ...]

    @property
    def best(self) -> int:
        """The smallest bound after which the simulated step gets hardly shorter."""
        shortest_s = min(forecast.step_s for forecast in self.simulated)
        enough = [forecast.step_s <= (1 + WORTHWHILE) * shortest_s for forecast in self.simulated]
        return self.bounds[enough.index(True)]


def make_plan(workload: Workload, bounds: Sequence[int]) -> Plan:
    """Bounds at which the learner would wait for ever are left out. Raises ConfigError if these are all."""
    possible = tuple(bound for bound in bounds if bound >= workload.smallest_bound)
    check(
        bool(possible), "--staleness", ",".join(map(str, bounds)),
        f"{workload.smallest_bound} or more with {rules_text(workload)}",
    )
    return Plan(
        workload, possible, tuple(closed_form(workload, bound) for bound in possible),
        tuple(simulated(workload, bound) for bound in possible),
    )


def measured_workload(folder: Path) -> Workload:
    """From a run directory, or all bounds of a sweep's first series.

    Raises:
        ConfigError: no durations are there, or the runs had rules that are not simulated.
    """
    runs = [run for row in first_series(rows_of(read_runs(folder))) for run in row.runs]
    if not runs:
        raise ConfigError(f"{folder} holds runs of staleness.mode=exact alone, which is not simulated")
    workload = workload_of([stages(run) for run in runs], rules_of(runs[0]))
    if math.isnan(workload.group_mean_s):
        raise ConfigError(f"{folder} holds no durations of rollout groups (rollout/group_s): was it too short a run?")
    return workload


def answer(args: argparse.Namespace) -> str:
    """What the options of `async-rl plan` ask for. Raises ConfigError."""
    _check_values(args)
    workload = planned_workload(args)
    parts = []
    if workload is not None:
        if args.rollout_s is not None:
            parts.append(describe_overlap(args.rollout_s, workload.train_s))
        plan = make_plan(workload, numbers(args.staleness, "--staleness"))
        parts.append(describe_plan(plan))
        if args.devices is not None:
            now = devices_now(args.now)
            parts.append(describe_splits(split_devices(workload, args.devices, plan.best, *now), plan.best))
    elif args.devices is not None:
        raise ConfigError("--devices needs a RUN_DIR or durations (--train-s 40 --group-s 60) to split them by")
    if args.params is not None:
        parts.append(describe_memory(args.params, args.method, args.device_gb, args.link_gbps))
    if not parts:
        raise ConfigError(
            "plan needs a RUN_DIR, durations (--train-s 40 --group-s 60, or --train-s 40 --rollout-s 60), "
            "or --params 70e9"
        )
    return "\n\n".join(parts)


def planned_workload(args: argparse.Namespace) -> Workload | None:
    """RUN_DIR's, with what the options give in its place; None if they give neither.

    Raises:
        ConfigError: the options do not make one.
    """
    given = {
        field.name: value
        for field in dataclasses.fields(Workload)
        if (value := getattr(args, field.name, None)) is not None
    }
    if not (args.folder or given or args.rollout_s is not None):
        return None
    if args.rollout_s is not None and {"group_mean_s", "load_s"} & set(given):
        raise ConfigError("--rollout-s is of all groups of a batch together: give it without --group-s and --load-s")
    if args.folder:
        workload = measured_workload(args.folder)
    else:
        if args.train_s is None or (args.rollout_s is None and "group_mean_s" not in given):
            raise ConfigError("without a RUN_DIR plan needs --train-s, and one of --group-s and --rollout-s")
        workload = Workload(sync_s=0.0)
    workload = dataclasses.replace(workload, **given)
    if args.rollout_s is None:
        return workload
    # A full engine takes as long for a batch however many groups are in flight together.
    group_s = args.rollout_s * (1 - workload.failed) / workload.prompts_per_step
    return dataclasses.replace(workload, group_mean_s=group_s, load_s=group_s)


def _check_values(args: argparse.Namespace) -> None:
    for name, option in ABOVE_0.items():
        value = getattr(args, name)
        check(value is None or 0 < value < math.inf, option, value, "above 0 and finite")
    for name, option in FROM_0.items():
        value = getattr(args, name)
        check(value is None or 0 <= value < math.inf, option, value, "0 or more and finite")
    check(args.devices is None or args.devices >= 2, "--devices", args.devices, "at least 2, one for each pool")


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
    ]
    if rules := rules_text(w):
        lines.append(f"Rules: {rules}.")
    lines += [
        "",
        "                  closed form                             simulation",
        "staleness.max  step, s  learner  rollout  staleness    step, s  learner  rollout  staleness  in flight",
    ]
    for bound, closed, found in zip(plan.bounds, plan.closed, plan.simulated, strict=True):
        lines.append(f"{bound:13}  {_columns(closed)}    {_columns(found)}  {found.in_flight:9.1%}")
    best = plan.simulated[plan.bounds.index(plan.best)]
    larger = (
        "larger bounds were not tried" if plan.best == plan.bounds[-1]
        else f"a larger bound, up to {plan.bounds[-1]}, gains less than {WORTHWHILE:.0%} more"
    )  # fmt: skip
    lines += ["", "In flight: rollout groups in flight over the concurrency."]
    if w.smallest_bound:
        lines.append(f"Left out: staleness.max below {w.smallest_bound}, where the learner would wait for ever.")
    lines += [
        f"Take staleness.max = {plan.best}: {plan.simulated[0].step_s / best.step_s:.2f} times the steps per hour of "
        f"staleness {plan.bounds[0]}, and {larger}.",
    ]
    return "\n".join(lines)


def _columns(forecast: Forecast | None) -> str:
    if forecast is None:
        return f"{'-':>7}  {'-':>7}  {'-':>7}  {'-':>9}"
    f = forecast
    return f"{f.step_s:7.3g}  {f.learner:7.1%}  {f.rollout:7.1%}  {f.staleness:9.2f}"


def rules_text(workload: Workload) -> str:
    """The settings that are none of the default ones, for a sentence."""
    w, default = workload, Workload()
    settings = {
        "staleness.late": (w.late, default.late), "weight_sync.every_steps": (w.every_steps, default.every_steps),
        "weight_sync.on_update": ("drain" if w.drain else "", ""), "buffer.max_uses": (w.max_uses, default.max_uses),
        "buffer.fresh_fraction": (w.fresh_fraction, default.fresh_fraction),
    }  # fmt: skip
    return ", ".join(f"{key}={value}" for key, (value, usual) in settings.items() if value != usual)


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
        forecast = closed_form(scaled, bound) or simulated(scaled, bound)
        splits.append(Split(learner_devices, rollout_devices, forecast))
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
        f"Rollout {rollout_s:.4g} s and learning {train_s:.4g} s a step: in turn the learner works "
        f"{gain.learner_in_turn:.0%} of the time, with full overlap {gain.learner_overlapped:.0%}, "
        f"{gain.speedup:.2f} times the steps."
    )
