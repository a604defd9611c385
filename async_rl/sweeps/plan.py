"""`async-rl plan`: predicts utilisation at each staleness bound, the best split of the devices, and memory."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from async_rl.config.check import check
from async_rl.errors import ConfigError
from async_rl.sweeps.capacity import describe_capacity
from async_rl.sweeps.cells import Bound, bounds_of, bounds_title
from async_rl.sweeps.prediction import SIMULATED_STEPS, first_series, rules_of, stages, timed_steps, workload_of
from async_rl.sweeps.results import read_runs
from async_rl.sweeps.settings import settings_of
from async_rl.sweeps.tables import Table
from buffer.simulate import Result, Workload, simulate

WORTHWHILE = 0.02
"""A larger bound must shorten the step by more than this share to be recommended."""
SPLIT_STEPS = 80
"""The number of simulated steps for each split of the devices."""
ABOVE_0 = (
    "train_s", "rollout_s", "group_mean_s", "concurrency", "prompts_per_step", "params", "device_gb", "link_gbps",
    "servers", "tokens", "group_size",
)  # fmt: skip
FROM_0 = ("sync_s", "load_s", "group_cv")
OPTIONS = {"group_mean_s": "--group-s", "group_cv": "--cv"}
"""The options that are not called as their values."""
TRAINED_BYTES = 2 + 2 + 12
"""The bytes of a trained parameter: bf16 weight and gradient, float32 master weight and two Adam moments."""
FROZEN_BYTES = 2
ROLES = {
    "ppo": {
        "policy": TRAINED_BYTES, "critic": TRAINED_BYTES, "reference": FROZEN_BYTES, "reward model": FROZEN_BYTES
    },
    "grpo": {"policy": TRAINED_BYTES, "reference": FROZEN_BYTES},
}  # fmt: skip
"""The bytes per parameter of each network of a method. All have the policy's size; GRPO needs no reward model."""


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

    def closed_form(self, bound: Bound) -> float:
        """Return the learner's utilisation by the formula min(Usat, (depth + 1) U0); it holds if few groups are slow.

        U0 is the simulated utilisation at the plan's smallest depth d, divided by d + 1. Usat is the utilisation that
        the learner reaches if the slower pool never waits.
        """
        w, first = self.workload, self.results[0].utilisation / (self.bounds[0].depth + 1)
        learner_s = w.train_s + w.receive_s + w.sync_s / w.every_steps
        fresh_s = w.group_s(w.concurrency) * w.fresh_per_step / w.concurrency / (1 - w.failed)
        return min(w.train_s / max(learner_s, fresh_s + w.standstill_s / w.every_steps), (bound.depth + 1) * first)


def make_plan(workload: Workload, bounds: Sequence[Bound]) -> Plan:
    """Return the plan: the simulated result of each bound, without bounds at which the learner would wait for ever.

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


def measured_workload(folder: Path) -> Workload:
    """Return the workload to simulate, as measured in a run directory or over all bounds of a sweep's first series.

    Raises:
        ConfigError: the runs have no measured durations, or settings that the simulator does not cover.
    """
    runs = [run for row in first_series(settings_of(read_runs(folder))) for run in row.runs]
    if not runs:
        raise ConfigError(f"all runs in {folder} have staleness.mode=exact, which is not simulated")
    runs = [run for run in runs if timed_steps(run)]
    if not runs:
        raise ConfigError(f"{folder} holds first steps of runs alone, which include the warm-up: train some more")
    workload = workload_of([stages(run) for run in runs], rules_of(runs[0]))
    if math.isnan(workload.group_mean_s):
        raise ConfigError(f"{folder} holds no durations of groups (rollout/group_s): was it too short a run?")
    return workload


def answer(args: argparse.Namespace) -> str:
    """Return the text that `async-rl plan` prints for its options. Raises ConfigError if they can't be used."""
    _check_values(args)
    workload = planned_workload(args)
    parts = []
    if workload is not None:
        plan = make_plan(workload, bounds_of(args.staleness))
        parts.append(describe_plan(plan))
        if args.devices is not None:
            now = devices_now(args.now)
            parts.append(describe_splits(split_devices(workload, args.devices, plan.best, *now), plan.best))
    elif args.devices is not None:
        raise ConfigError("--devices needs a RUN_DIR or durations (--train-s 40 --group-s 60) as well")
    if args.params is not None:
        parts.append(describe_memory(args.params, args.method, args.device_gb, args.link_gbps))
    if args.servers is not None:
        parts.append(describe_capacity(args.servers, args.tokens, args.group_size, args.link_gbps))
    if not parts:
        raise ConfigError(
            "plan needs a RUN_DIR, durations (--train-s 40 --group-s 60, or --train-s 40 --rollout-s 60), "
            "--params 70e9 or --servers 1000"
        )
    return "\n\n".join(parts)


def planned_workload(args: argparse.Namespace) -> Workload | None:
    """Return the workload to simulate: that of RUN_DIR, with values replaced by options; None if neither is given.

    Raises:
        ConfigError: the options are not enough for a workload, or contradict each other.
    """
    given = {
        field.name: value
        for field in dataclasses.fields(Workload)
        if (value := getattr(args, field.name, None)) is not None
    }
    if not (args.folder or given or args.rollout_s is not None):
        return None
    if args.rollout_s is not None and {"group_mean_s", "load_s"} & set(given):
        raise ConfigError("--rollout-s is the time of a whole batch: give it without --group-s and --load-s")
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
    for name in (*ABOVE_0, *FROM_0):
        value, allowed = getattr(args, name), "above 0 and finite" if name in ABOVE_0 else "0 or more and finite"
        is_allowed = value is None or 0 < value < math.inf or (value == 0 and name in FROM_0)
        check(is_allowed, OPTIONS.get(name, f"--{name.replace('_', '-')}"), value, allowed)
    check(args.devices is None or args.devices >= 2, "--devices", args.devices, "at least 2, one for each pool")
    devices_now(args.now)


def devices_now(now: str) -> tuple[int, int]:
    learner, comma, rollout = now.partition(",")
    if not (comma and learner.isdecimal() and rollout.isdecimal() and int(learner) and int(rollout)):
        raise ConfigError(f"--now must be learner,rollout devices, e.g. 4,4; got {now!r}")
    return int(learner), int(rollout)


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
        bounds_title(plan.bounds), "step, s", "learner", "rollout", "learner, closed form", "staleness, mean",
        "groups in flight / concurrency",
    )  # fmt: skip
    rows = [
        [str(bound), *_shares(r), f"{plan.closed_form(bound):.1%}", f"{r.mean_staleness:.2f}", f"{r.in_flight:.1%}"]
        for bound, r in zip(plan.bounds, plan.results, strict=True)
    ]
    lines += ["", Table(header, rows).markdown()]
    if smallest := w.slot_limits.smallest_depth:
        lines.append(f"Left out: depths below {smallest:g}, where the learner would wait for ever.")
    larger = (
        "larger ones were not tried" if plan.best == plan.bounds[-1]
        else f"a larger one, up to {plan.bounds[-1]}, gains less than {WORTHWHILE:.0%} more"
    )  # fmt: skip
    gain = plan.results[0].step_s / plan.results[plan.bounds.index(plan.best)].step_s
    lines.append(
        f"Take {setting_text(plan.best)}: {gain:.2f} times the steps per hour of staleness {plan.bounds[0]}, "
        f"and {larger}."
    )
    return "\n".join(lines)


def _shares(result: Result) -> list[str]:
    return [f"{result.step_s:.3g}", f"{result.utilisation:.1%}", f"{result.rollout:.1%}"]


def rules_text(workload: Workload) -> str:
    """Return as `key=value, ...` those settings of staleness, pushes and replay that differ from their defaults."""
    w, default = workload, Workload()
    settings = {
        "staleness.late": (w.late, default.late), "weight_sync.every_steps": (w.every_steps, default.every_steps),
        "weight_sync.on_update": ("drain" if w.drain else "", ""), "buffer.max_uses": (w.max_uses, default.max_uses),
        "buffer.fresh_fraction": (w.fresh_fraction, default.fresh_fraction),
    }  # fmt: skip
    return ", ".join(f"{key}={value}" for key, (value, usual) in settings.items() if value != usual)


def setting_text(bound: Bound) -> str:
    depth = "" if bound.is_full else f" and staleness.depth = {bound.depth:g}"
    return f"staleness.max = {bound.max}{depth}"


def split_devices(
    workload: Workload, devices: int, bound: Bound, learner_now: int, rollout_now: int
) -> dict[tuple[int, int], Result]:
    """Simulate each split of `devices` into two pools; return results {(learner devices, rollout devices): result}.

    With more devices the learner's time shrinks in proportion, and so does load_s, while rollout concurrency grows.

    Args:
        learner_now, rollout_now: the devices that the workload's durations were measured with.
    """
    results = {}
    for learner_devices in range(1, devices):
        share = (devices - learner_devices) / rollout_now
        scaled = dataclasses.replace(
            workload, train_s=workload.train_s * learner_now / learner_devices, load_s=workload.load_s / share,
            concurrency=max(1, int(workload.concurrency * share)),
        )
        split = learner_devices, devices - learner_devices
        results[split] = simulate(scaled, bound.max, SPLIT_STEPS, depth=bound.depth)
    return results


def describe_splits(splits: dict[tuple[int, int], Result], bound: Bound) -> str:
    best = min(splits, key=lambda split: splits[split].step_s)
    rows = [[str(learner), str(rollout), *_shares(result)] for (learner, rollout), result in splits.items()]
    header = ("learner devices", "rollout devices", "step, s", "learner", "rollout")
    table = Table(header, rows, best=(list(splits).index(best),)).markdown()
    return f"{table}\nAt {setting_text(bound)} take {best[0]} for the learner, {best[1]} for rollout."


def describe_memory(parameters: float, method: str, device_gb: float, link_gbps: float) -> str:
    sizes_gb = {role: parameters * role_bytes / 1e9 for role, role_bytes in ROLES[method].items()}
    total_gb = math.fsum(sizes_gb.values())
    lines = [f"Learner memory, {parameters / 1e9:g} billion parameters, {method}, Adam in mixed precision (bf16):"]
    lines += [f"    {role:<14} {size:9,.1f} GB" for role, size in sizes_gb.items()]
    weights_gb = FROZEN_BYTES * parameters / 1e9
    lines += [
        f"    {'together':<14} {total_gb:9,.1f} GB: at least {math.ceil(total_gb / device_gb)} x {device_gb:g} GB, "
        "activations and the rollout servers' copies not counted",
        f"A push of {weights_gb:,.3g} GB of bf16 weights over {link_gbps:g} Gb/s takes "
        f"{8 * weights_gb / link_gbps:.3g} s.",
    ]
    return "\n".join(lines)
