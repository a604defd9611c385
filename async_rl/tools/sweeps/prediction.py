"""Measures the durations of a run's stages, makes a workload of them, and compares simulated with measured values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rl.base.config.yaml_text import read_yaml
from async_rl.base.errors import ConfigError
from async_rl.base.telemetry.figures import is_warm_up
from async_rl.tools.sweeps.cells import Bound
from async_rl.tools.sweeps.results import Run, Step
from async_rl.tools.sweeps.settings import Setting
from buffer.simulate import Result, Workload, simulate

SIMULATED_STEPS = 150
MOST_HELD = 0.01
"""The largest share of a run's time for which its pushes may wait for evaluations, if it is to be simulated."""


@dataclass(frozen=True, slots=True)
class Stages:
    """The mean durations of the stages of one run; nan for a stage that the run did not measure."""

    train_s: float
    train_cv: float
    sync_s: float
    """The duration of a push, without its waits for groups to drain or for an evaluation."""
    pushes: float
    """The number of pushes per step."""
    pause_s: float
    """How long generation pauses in a push."""
    receive_s: float
    """How long the learner takes to receive a batch that is ready."""
    group_s: float
    """The duration of a group without the pauses of pushes. An aborted group counts until it was aborted."""
    group_cv: float
    together: float
    """The mean number of groups in flight while a group runs."""
    rollout_busy_s: float
    """The time per step with at least one group in flight, also while an evaluation runs."""
    failed: float


def stages(run: Run) -> Stages:
    steps = timed_steps(run)
    train = [value for step in steps if (value := step.get("time/train_s")) is not None]
    pushes = [value for step in steps if (value := step.get("time/push_s")) is not None]
    step_s = float(run.summary["seconds"]) / max(1, len(steps))
    busy, paused = (float(run.summary.get(f"utilisation/rollout{state}", math.nan)) for state in ("", "/sync"))
    running = 1 - paused / max(busy + paused, 1e-9)
    buffer = run.summary["buffer"]
    dropped = sum(buffer.get(f"buffer/dropped_{reason}", 0.0) for reason in ("failed", "zero_variance"))
    return Stages(
        train_s=float(np.mean(train)), train_cv=float(np.std(train) / np.mean(train)), sync_s=run.figure("time/push_s"),
        pushes=len(pushes) / max(1, len(steps)), pause_s=run.figure("push/pause_s"),
        receive_s=_receive_s(steps),
        group_s=run.figure("rollout/group_s") * running, group_cv=_group_cv(run),
        together=run.figure("rollout/concurrency"),
        rollout_busy_s=busy * step_s,
        failed=dropped / max(1.0, dropped + buffer.get("buffer/trained", 0.0)),
    )


def _receive_s(steps: Sequence[Step]) -> float:
    """Return the median of the learner's waits for a batch without the time when the buffer had none; 0 if none."""
    pairs = [(step.get("time/wait_data_s"), step.get("buffer/waited_s")) for step in steps]
    found = [max(0.0, waits - without) for waits, without in pairs if waits is not None and without is not None]
    return float(np.median(found)) if found else 0.0


def timed_steps(run: Run) -> list[Step]:
    """Return the steps of a run without the first of each start, which are not in its seconds either."""
    return [step for step in run.steps if not is_warm_up(step)]


def _group_cv(run: Run) -> float:
    """Return the standard deviation of the durations of a step's groups, divided by their mean; nan if not measured."""
    variances, means = [], []
    for step in timed_steps(run):
        mean, square = step.get("rollout/group_s"), step.get("rollout/group_s_squared")
        if mean is not None and square is not None:
            variances.append(max(0.0, square - mean**2))
            means.append(mean)
    return math.sqrt(float(np.mean(variances))) / float(np.mean(means)) if means else math.nan


def workload_of(found: Sequence[Stages], rules: Workload) -> Workload:
    """Return one workload for the simulator, made of the measured stages of runs at several bounds.

    A straight line is fitted to the duration of a group over the number of groups in flight. If all runs had nearly
    the same number in flight, the engine counts as full (load_s = group_mean_s).

    Args:
        rules: the sizes and rules of the runs, from `rules_of`.
    """
    load = np.array([stage.together for stage in found])
    durations = np.array([stage.group_s for stage in found])
    load_s = float(np.mean(durations / load))
    if len(found) > 1 and load.std() > 0.1 * load.mean():
        load_s = float(np.clip(np.polyfit(load, durations, 1)[0], 0.0, load_s))
    alone_s = float(np.mean(durations - load_s * (load - 1)))

    workload = dataclasses.replace(
        rules, group_mean_s=float(np.maximum(alone_s, 1e-6)), load_s=load_s, group_cv=_mean(found, "group_cv"),
        failed=_mean(found, "failed"),
    )
    return with_learner_of(workload, found)


def with_learner_of(workload: Workload, found: Sequence[Stages]) -> Workload:
    """Return `workload` with the learner's durations of `found`, in the mean: training, push, receiving a batch."""
    return dataclasses.replace(
        workload, train_s=_mean(found, "train_s"), train_cv=_mean(found, "train_cv"), sync_s=_mean(found, "sync_s"),
        pause_s=_mean(found, "pause_s"), receive_s=_mean(found, "receive_s"),
    )


def _mean(found: Sequence[Stages], name: str) -> float:
    return _mean_of([getattr(stage, name) for stage in found])


def _mean_of(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


@dataclass(frozen=True, slots=True)
class Measured:
    """The values measured at one staleness bound, beside their prediction and the work-conserving bound."""

    staleness: Bound
    learner: float
    rollout: float
    staleness_mean: float
    bound: float
    """The work-conserving bound of learner + rollout, from work_conserving_bound."""
    predicted: Result | None
    """The simulator's result; None if it does not cover the run's rules, or if durations were not measured."""


def work_conserving_bound(found: Stages, depth: float) -> float:
    """Return the largest sum of learner and rollout utilisation that the run's stage times allow.

    It assumes that a step takes the time of both pools one after the other at depth 0, else the slower pool's.
    """
    learner_s, rollout_s = found.train_s + found.pushes * found.sync_s, found.rollout_busy_s
    step_s = learner_s + rollout_s if depth == 0 else max(learner_s, rollout_s + found.pushes * found.pause_s)
    return (found.train_s + found.rollout_busy_s) / step_s


def first_series(rows: Sequence[Setting]) -> list[Setting]:
    """Return the rows of the first series, which differ only in the staleness bound, without runs in exact mode."""
    bounded = [row for row in rows if not row.exact]
    return [row for row in bounded if row.series == bounded[0].series]


def compare(rows: Sequence[Setting]) -> list[Measured]:
    """Return for each staleness bound of the first series the measured values with their prediction.

    The simulator gets the bound's own durations of training and push, and group durations fitted over all bounds. A run
    that ended after its first step has no durations, and does not count.
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
                bound=_mean_of([work_conserving_bound(stage, row.staleness.depth) for stage in own]),
                predicted=_predict(runs[0], own, everywhere) if own else None,
            )
        )
    return measured


def _predict(run: Run, own: Sequence[Stages], everywhere: Sequence[Stages]) -> Result | None:
    """Return the simulated values of runs with stages `own` and the rules of `run`; None if they can't be simulated."""
    try:
        workload = workload_of(everywhere, rules_of(run))
    except ConfigError:
        return None
    if math.isnan(workload.group_mean_s) or math.isnan(workload.group_cv):  # e.g. no group ended after the first step
        return None
    bound = Bound.of_config(_config(run)["staleness"])  # the depth may be an axis of its own
    steps = min(SIMULATED_STEPS, len(run.steps))
    return simulate(with_learner_of(workload, own), bound.max, steps, depth=bound.depth)


def rules_of(run: Run) -> Workload:
    """Return a workload with the sizes and rules of the run's config; its durations are the simulator's defaults.

    Raises:
        ConfigError: the simulator does not cover the run.
    """
    config = _config(run)
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
    return Workload(
        concurrency=int(config["rollout"]["max_groups_in_flight"] * config["placement"]["rollout"]["servers"]),
        prompts_per_step=config["learner"]["prompts_per_step"],
        late=staleness["on_late"], max_uses=buffer["max_uses"], fresh_fraction=buffer["fresh_fraction"],
        every_steps=push["every_steps"], drain=push["on_update"] == "drain",
    )


def _config(run: Run) -> dict[str, Any]:
    config: dict[str, Any] = read_yaml((run.folder / "config.yaml").read_text())[0]
    return config
