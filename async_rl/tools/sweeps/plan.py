"""`async-rl plan`: predicts the speed of each staleness bound by simulation, from measured or given durations.

It measures the durations of a run's stages, makes the simulator's workload from them, and compares simulated with
measured values.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from async_rl.base.config.check import check
from async_rl.base.errors import ConfigError
from async_rl.base.telemetry.metrics import is_warm_up
from async_rl.tools.sweeps.cells import Bound, bounds_of, bounds_title
from async_rl.tools.sweeps.results import Run, Step, read_runs
from async_rl.tools.sweeps.settings import Setting, recommendation, settings_of
from async_rl.tools.sweeps.tables import Table
from buffer.simulate import Result, Workload, simulate

SIMULATED_STEPS = 150
MOST_HELD = 0.01
"""A run can be simulated only if its pushes waited for evaluations for at most this share of its time."""
WORTHWHILE = 0.02
"""A larger bound is recommended only if it shortens the step by more than this share."""
ABOVE_0 = ("train_s", "rollout_s", "group_mean_s", "concurrency", "prompts_per_step")
FROM_0 = ("sync_s", "load_s", "group_cv")
LEARNER_S = ("train_s", "train_cv", "sync_s", "pause_s", "receive_s")
MOST_MORE_SERVERS = 4
LEAVE_S = 30.0
"""How long a host of Ray that is taken away goes on (RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S)."""
BUSY = 0.9
"""A learner that is busy for so large a share of its time limits the steps."""
OPTIONS = {"group_mean_s": "--group-s", "group_cv": "--cv"}
"""Options whose names differ from the workload's fields."""


@dataclass(frozen=True, slots=True)
class Plan:
    workload: Workload
    bounds: tuple[Bound, ...]
    results: tuple[Result, ...]

    @property
    def best(self) -> Bound:
        """The smallest bound whose step is at most 2 % longer than the shortest step of all bounds."""
        shortest_s = min(result.step_s for result in self.results)
        enough = [result.step_s <= (1 + WORTHWHILE) * shortest_s for result in self.results]
        return self.bounds[enough.index(True)]


def answer(args: argparse.Namespace) -> str:
    """Return the text that `async-rl plan` prints. Raises ConfigError if the options can't be used.

    For the folder of a sweep, the text begins with the recommendation from its measured results. The simulation can't
    give one, because it does not predict how much a step with stale data learns.
    """
    for name in (*ABOVE_0, *FROM_0):
        value, allowed = getattr(args, name), "above 0 and finite" if name in ABOVE_0 else "0 or more and finite"
        is_allowed = value is None or 0 < value < math.inf or (value == 0 and name in FROM_0)
        check(is_allowed, OPTIONS.get(name, f"--{name.replace('_', '-')}"), value, allowed)
    rows = settings_of(read_runs(args.folder)) if args.folder else []
    workload = planned_workload(args, rows)
    plan = make_plan(workload, bounds_of(args.staleness))
    text = describe_plan(plan)
    if rows and args.rollout_s is None:
        is_one_run = len(rows) == 1
        text += f"\n\n{describe_servers(workload, rows[0].staleness if is_one_run else plan.best, not is_one_run)}"
    return f"Measured: {recommendation(rows)}\n\n{text}" if len(rows) > 1 else text


def make_plan(workload: Workload, bounds: Sequence[Bound]) -> Plan:
    """Simulate each bound, except bounds that would make the learner wait for ever.

    Raises:
        ConfigError: the learner would wait for ever at each of the bounds.
    """
    possible = tuple(bound for bound in bounds if workload.slot_limits.is_enough(bound.depth))
    check(
        bool(possible), "--staleness", ",".join(map(str, bounds)),
        f"{workload.slot_limits.smallest_depth:g} or more with the run's sections buffer and weight_sync",
    )
    results = (simulate(workload, bound.max, SIMULATED_STEPS, depth=bound.depth) for bound in possible)
    return Plan(workload, possible, tuple(results))


def measured_workload(rows: Sequence[Setting], folder: Path) -> Workload:
    """Return the workload measured in a run, or over all bounds of a sweep's first series.

    Raises:
        ConfigError: the runs have no measured durations, or settings that the simulator does not support.
    """
    runs = [run for row in first_series(rows) for run in row.runs if timed_steps(run)]
    if not runs:
        raise ConfigError(f"{folder} holds no run of several steps with staleness.mode=bounded, which plan simulates")
    workload = workload_of([stages(run) for run in runs], rules_of(runs[0]))
    if math.isnan(workload.group_mean_s):
        raise ConfigError(f"{folder} holds no durations of groups (rollout/group_s): was it too short a run?")
    return workload


def planned_workload(args: argparse.Namespace, rows: Sequence[Setting]) -> Workload:
    """Return the workload to simulate: the one measured in `rows`, with values replaced by options.

    Args:
        rows: the results in RUN_DIR; empty: all values come from options.

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
    if args.rollout_s is not None:  # full servers take as long for a batch however many groups are in flight together
        per_batch = given.get("prompts_per_step", workload.prompts_per_step)
        at_a_server_s = args.rollout_s * workload.servers
        given["group_mean_s"] = given["load_s"] = at_a_server_s * (1 - workload.failed) / per_batch
    return dataclasses.replace(workload, **given)


def describe_plan(plan: Plan) -> str:
    w = plan.workload
    lines = [
        f"Learner: {w.train_s:.3g} s to train a batch of {w.prompts_per_step} groups, {w.sync_s:.3g} s to push, "
        f"{w.receive_s:.3g} s to receive a batch.",
        f"Rollout: a group takes {w.group_mean_s:.3g} s alone and {w.load_s:.3g} s more for each other one in flight, "
        f"{w.concurrency} at most; standard deviation {w.group_cv:.0%}; {w.failed:.0%} are dropped.",
    ]
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


def describe_servers(workload: Workload, bound: Bound, knows_load: bool) -> str:
    """Return what other numbers of rollout servers would bring to a run at `bound`, and what the loss of one costs.

    Args:
        knows_load: whether the durations of groups at several loads were measured. One run does not tell how much of a
            group's time is due to the others at its server. Then each figure is a range: from an engine that is full,
            as `workload` assumes for one run, to an engine with room for more.
    """
    now = simulate(workload, bound.max, SIMULATED_STEPS, depth=bound.depth).in_flight * workload.concurrency
    per_server, group_s = max(1, workload.concurrency // workload.servers), workload.group_s(now)
    engines = [workload]
    if not knows_load:
        engines.append(dataclasses.replace(workload, group_mean_s=group_s, load_s=0.0))
    rows = []
    for servers in range(max(1, workload.servers - 1), workload.servers + MOST_MORE_SERVERS + 1):
        with_servers = [dataclasses.replace(w, servers=servers, concurrency=per_server * servers) for w in engines]
        found = [simulate(w, bound.max, SIMULATED_STEPS, depth=bound.depth) for w in with_servers]
        limits = dict.fromkeys(_limit(w, result, bound) for w, result in zip(with_servers, found, strict=True))
        rows.append([
            f"{servers}{' (now)' if servers == workload.servers else ''}",
            _range([60 / result.step_s for result in found], "{:.3g}"),
            _range([result.utilisation for result in found], "{:.0%}"),
            _range([result.mean_staleness for result in found], "{:.2f}"), " or ".join(limits),
        ])  # fmt: skip
    table = Table(("rollout servers", "steps a minute", "learner", "staleness, mean", "what limits"), rows).markdown()
    age_s = group_s * (1 + workload.group_cv**2) / 2
    ranges = "" if knows_load else ", from an engine that is full to one that has room"
    return (
        f"Other numbers of servers at staleness {bound}{ranges}:\n\n{table}\n"
        f"A server that is lost takes {now / workload.servers:.1f} groups in flight with it. They have run for "
        f"{age_s:.3g} s on average, and other servers begin their prompts anew. "
        f"{share_that_ends(group_s, workload.group_cv, LEAVE_S):.0%} of them would have ended within {LEAVE_S:.0f} s."
    )


def share_that_ends(mean_s: float, cv: float, within_s: float) -> float:
    """Return the share of the groups in flight at some moment that end within `within_s` seconds from then.

    That is E[min(T, L)] / E[T], with L = within_s and T the duration of a group: lognormal, of this mean and this
    standard deviation over the mean. (A renewal process is met by an interval in proportion to its length.)
    """
    if cv == 0:
        return min(1.0, within_s / mean_s)
    sigma = math.sqrt(math.log(1 + cv**2))
    z = (math.log(within_s / mean_s) + sigma**2 / 2) / sigma  # (log L - mu) / sigma
    normal = NormalDist()
    return normal.cdf(z - sigma) + within_s / mean_s * (1 - normal.cdf(z))


def _limit(workload: Workload, found: Result, bound: Bound) -> str:
    """Return what limits the steps of a simulated run: the learner, or what shortens a step more if there is more."""
    if found.utilisation >= BUSY:
        return "learner"
    servers = workload.servers + 1
    more = dataclasses.replace(workload, servers=servers, concurrency=workload.concurrency * servers // (servers - 1))
    with_server = simulate(more, bound.max, SIMULATED_STEPS, depth=bound.depth).step_s
    with_slots = simulate(workload, bound.max + 1, SIMULATED_STEPS, depth=bound.depth + 1).step_s
    return "slots (staleness.depth)" if with_slots < with_server else "servers"


def _range(values: Sequence[float], form: str) -> str:
    return " to ".join(dict.fromkeys(form.format(value) for value in sorted(values)))


@dataclass(frozen=True, slots=True)
class Stages:
    """The mean durations of the stages of one run, as in Workload; nan for a stage that the run did not measure."""

    train_s: float
    train_cv: float
    sync_s: float
    """The duration of a push, excluding waits for groups to drain or for an evaluation."""
    pause_s: float
    receive_s: float
    group_s: float
    """The duration of a group, excluding the pauses of pushes. An aborted group counts until its abort."""
    group_cv: float
    together: float
    """The mean number of groups in flight at its server during a group."""
    failed: float


def stages(run: Run) -> Stages:
    steps = timed_steps(run)
    train = [value for step in steps if (value := step.get("time/train_s")) is not None]
    running = 1.0  # with depth 0 or drain no group is in flight during a push
    if Bound.of_config(run.config["staleness"]).depth and run.config["weight_sync"]["on_update"] != "drain":
        busy, paused = run.summary_value("utilisation/rollout"), run.summary_value("utilisation/rollout/sync")
        running = 1 - paused / max(busy + paused, 1e-9)
    buffer = run.summary["buffer"]
    dropped = sum(buffer.get(f"buffer/dropped_{reason}", 0.0) for reason in ("failed", "zero_variance"))
    return Stages(
        train_s=float(np.mean(train)), train_cv=float(np.std(train) / np.mean(train)), sync_s=run.figure("time/push_s"),
        pause_s=run.figure("push/pause_s"), receive_s=_receive_s(steps), group_cv=_group_cv(run),
        group_s=run.figure("rollout/group_s") * running, together=run.figure("rollout/concurrency"),
        failed=dropped / max(1.0, dropped + buffer.get("buffer/trained", 0.0)),
    )


def _receive_s(steps: Sequence[Step]) -> float:
    """Return the median of the learner's waits for a batch, excluding the time when the buffer had none; 0 if none."""
    pairs = [(step.get("time/wait_data_s"), step.get("buffer/waited_s")) for step in steps]
    found = [max(0.0, waits - without) for waits, without in pairs if waits is not None and without is not None]
    return float(np.median(found)) if found else 0.0


def timed_steps(run: Run) -> list[Step]:
    """Return the steps of a run except the first of each start, which the run's seconds exclude too."""
    return [step for step in run.steps if not is_warm_up(step)]


def _group_cv(run: Run) -> float:
    """Return the standard deviation of group durations within a step, divided by their mean; nan if not measured."""
    variances, means = [], []
    for step in timed_steps(run):
        mean, square = step.get("rollout/group_s"), step.get("rollout/group_s_squared")
        if mean is not None and square is not None:
            variances.append(max(0.0, square - mean**2))
            means.append(mean)
    return math.sqrt(float(np.mean(variances))) / float(np.mean(means)) if means else math.nan


def workload_of(found: Sequence[Stages], rules: Workload, own: Sequence[Stages] = ()) -> Workload:
    """Combine the measured stages of runs at several bounds to one workload for the simulator.

    A straight line is fitted to the duration of a group over the number of groups in flight at its server. If all runs
    had nearly the same number in flight, the engine counts as full (load_s = group_mean_s).

    Args:
        rules: the sizes and rules of the runs, from `rules_of`.
        own: the stages from which the learner's durations are taken; empty: `found`.
    """

    def mean(name: str, of: Sequence[Stages]) -> float:
        return float(np.mean([getattr(stage, name) for stage in of]))

    load = np.array([stage.together for stage in found])
    durations = np.array([stage.group_s for stage in found])
    load_s = float(np.mean(durations / load))
    if len(found) > 1 and load.std() > 0.1 * load.mean():
        load_s = float(np.clip(np.polyfit(load, durations, 1)[0], 0.0, load_s))
    alone_s = float(np.mean(durations - load_s * (load - 1)))
    measured: dict[str, Any] = {name: mean(name, found) for name in ("group_cv", "failed")}
    measured |= {name: mean(name, own or found) for name in LEARNER_S}
    return dataclasses.replace(rules, group_mean_s=float(np.maximum(alone_s, 1e-6)), load_s=load_s, **measured)


@dataclass(frozen=True, slots=True)
class Measured:
    """The values measured at one staleness bound, with their prediction."""

    staleness: Bound
    learner: float
    rollout: float
    staleness_mean: float
    predicted: Result | None
    """The simulator's result; None if it does not support the run's rules, or durations were not measured."""


def first_series(rows: Sequence[Setting]) -> list[Setting]:
    """Return the rows of the first series, which differ only in the staleness bound. Rows in exact mode are left out.
    """
    bounded = [row for row in rows if not row.exact]
    return [row for row in bounded if row.series == bounded[0].series]


def compare(rows: Sequence[Setting]) -> list[Measured]:
    """Return a `Measured` for each staleness bound of the first series: what was measured, and what the simulator
    predicts.

    The simulator gets durations of training and push from the runs at that bound, and durations of groups from all
    runs. Runs that ended after their first step are left out, because they have no durations.
    """
    timed = [(row, [run for run in row.runs if timed_steps(run)]) for row in first_series(rows)]
    everywhere = [stages(run) for _, runs in timed for run in runs]
    measured = []
    for row, runs in timed:
        own = [stages(run) for run in runs]
        measured.append(
            Measured(
                staleness=row.staleness, learner=row.estimate("learner").mean, rollout=row.estimate("rollout").mean,
                staleness_mean=row.estimate("staleness_mean").mean,
                predicted=_predict(runs[0], own, everywhere) if own else None,
            )
        )
    return measured


def _predict(run: Run, own: Sequence[Stages], everywhere: Sequence[Stages]) -> Result | None:
    """Simulate runs; None if they can't be simulated.

    Args:
        run: the run that gives the rules.
        own, everywhere: the stages of these runs, and of the runs at all bounds.
    """
    try:
        workload = workload_of(everywhere, rules_of(run), own)
    except ConfigError:
        return None
    if math.isnan(workload.group_mean_s) or math.isnan(workload.group_cv):  # e.g. no group ended after the first step
        return None
    bound = Bound.of_config(run.config["staleness"])  # the depth may be an axis of its own
    steps = min(SIMULATED_STEPS, len(run.steps))
    return simulate(workload, bound.max, steps, depth=bound.depth)


def rules_of(run: Run) -> Workload:
    """Return a workload with the sizes and rules of a run's config. Its durations are the simulator's defaults.

    Raises:
        ConfigError: the simulator does not support the run's settings.
    """
    config = run.config
    held_s = sum(step.get("time/held_by_eval_s") or 0.0 for step in timed_steps(run))
    uncovered = {
        "episodes of several turns": any(config["task"].get(key) for key in ("env", "agent", "tools")),
        "eval.pin_version without placement.eval.servers":
            config["eval"]["pin_version"] and not config["placement"].get("eval", {}).get("servers"),
        "pushes that waited for evaluations (time/held_by_eval_s)": held_s > MOST_HELD * float(run.summary["seconds"]),
    }
    if found := [what for what, is_so in uncovered.items() if is_so]:
        raise ConfigError(
            f"no prediction for {run.folder}: {' and '.join(found)} can't be simulated. Measure the bounds with "
            "`async-rl sweep`"
        )
    staleness, buffer, push = config["staleness"], config["buffer"], config["weight_sync"]
    servers = _num_servers(run, config["placement"]["rollout"]["servers"])
    return Workload(
        concurrency=int(config["rollout"]["max_groups_in_flight"] * servers), servers=servers,
        prompts_per_step=config["learner"]["prompts_per_step"],
        late=staleness["on_late"], max_uses=buffer["max_uses"], fresh_fraction=buffer["fresh_fraction"],
        every_steps=push["every_steps"], drain=push["on_update"] == "drain",
    )


def _num_servers(run: Run, configured: int | dict[str, int]) -> int:
    """Return how many rollout servers a run had: on average over its steps, if servers may join and leave."""
    if isinstance(configured, int):
        return configured
    counts = [sum(key.startswith("version/rollout/") for key in step) for step in timed_steps(run)]
    with_push = [count for count in counts if count]
    return max(1, round(float(np.mean(with_push)))) if with_push else configured["min"]
