"""What each staleness bound will cost and bring in time: closed form and simulation, from durations and rules.

The learner trains a batch in T, pushes in S, receives a batch that is ready in H. A group with n in flight takes
D(n) = group_mean_s + load_s (n - 1). A step needs N = B / (1 - failed) groups, of which at most
n = min(K, (bound + 1) B) are in flight. With R the time that the N groups of one batch take when started together:

    step(bound) = max(T + S + H,  N D(n) / n + pause,  (R + T + S + H) / (bound + 1))
    learner = T / step        rollout = min(1 - pause / step, R / step)

The three terms: the learner alone, the rollout pool alone at its best throughput, and a group's whole way round with
bound + 1 batches on it. It is a lower bound of the step; the simulation adds what chance does to it. With a push every
E steps S and pause count 1/E each, and the way round has E trainings on it. Late groups that are dropped, groups used
again and pushes that drain are simulated alone.
Source: asymptotic bounds of closed queueing networks, Denning and Buzen 1978, "The operational analysis of queueing
network models".
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from async_rl.errors import ConfigError
from benchmarks.results import Row, Run
from benchmarks.simulate import Workload, simulate

SIMULATED_STEPS = 150


@dataclass(frozen=True, slots=True)
class Forecast:
    step_s: float
    learner: float
    """Utilisation: busy share of time."""
    rollout: float
    """Utilisation: share of time with at least one group in flight and no push."""
    in_flight: float
    """Groups in flight over the concurrency, mean over all time."""
    staleness: float
    """Mean, at the end of a warm run."""


def closed_form(workload: Workload, bound: int) -> Forecast | None:
    """None for rules that it does not cover."""
    w = workload
    if w.late != "wait" or w.max_uses > 1 or w.drain:
        return None
    groups = w.prompts_per_step / (1 - w.failed)
    in_flight = min(w.concurrency, (bound + 1) * w.prompts_per_step)
    together_s = batch_seconds(w)
    learner_s = w.train_s + (w.sync_s / w.every_steps) + w.handout_s
    pause_s = w.standstill_s / w.every_steps
    rollout_s = groups * w.group_s(in_flight) / in_flight + pause_s
    round_s = (together_s + w.every_steps * learner_s) / (bound + 1)
    step_s = max(learner_s, rollout_s, round_s)
    running = min(groups * w.group_s(in_flight) / step_s, in_flight)
    return Forecast(
        step_s=step_s, learner=w.train_s / step_s, rollout=min(1 - pause_s / step_s, together_s / step_s),
        in_flight=running / w.concurrency, staleness=_mean_staleness(w, bound, step_s, rollout_s),
    )


def _mean_staleness(workload: Workload, bound: int, step_s: float, rollout_s: float) -> float:
    """All (bound + 1) B slots are taken, which makes every group `bound` old, unless generation is the bottleneck and
    can't run so many. Then, by Little's law, K groups in flight pass in K / B steps, and versions count from the one
    served, which lags by the learner's share of a step.
    """
    w = workload
    if rollout_s < step_s:
        return float(bound)
    return min(float(bound), w.concurrency / w.prompts_per_step + (w.train_s + w.sync_s) / step_s)


@functools.cache
def batch_seconds(workload: Workload) -> float:
    """R: the mean time of one batch's groups, started together and nothing else in flight."""
    alone = dataclasses.replace(workload, train_s=0.0, sync_s=0.0, pause_s=None, handout_s=0.0, every_steps=1)
    return simulate(alone, 0, 20).step_s


def simulated(workload: Workload, bound: int, steps: int = SIMULATED_STEPS, seed: int = 0) -> Forecast:
    """Raises ConfigError where the learner would wait for ever."""
    result = simulate(workload, bound, steps, seed)
    return Forecast(result.step_s, result.utilisation, result.rollout, result.in_flight, result.mean_staleness)


@dataclass(frozen=True, slots=True)
class Stages:
    """Mean durations of one run."""

    train_s: float
    train_cv: float
    sync_s: float
    """Of a push alone. What it has to wait for (groups to drain, an evaluation) is no work."""
    pushes: float
    """For each step."""
    pause_s: float
    """Of a push."""
    handout_s: float
    group_s: float
    """Of a group in flight, standstill in pushes not counted. An aborted one counts with what it had taken."""
    group_cv: float
    together: float
    """Groups in flight together, as a group saw it."""
    in_flight: float
    """Groups in flight over the concurrency, mean over all time; what Forecast.in_flight predicts."""
    rollout_busy_s: float
    """At least one group in flight, for each step. Evaluation beside them is in it, in what the groups take."""
    failed: float


def stages(run: Run) -> Stages:
    """nan for what the run did not measure."""
    steps = run.steps[1:]
    train = [value for step in steps if (value := step.get("time/train_s")) is not None]
    waits = [value for step in steps if (value := step.get("time/wait_data_s")) is not None]
    pushes = [value for step in steps if (value := step.get("time/push_s")) is not None]
    step_s = float(run.summary["seconds"]) / max(1, len(steps))
    busy, paused = (float(run.summary.get(f"utilisation/rollout{state}", math.nan)) for state in ("", "/sync"))
    mean_s = run.mean("rollout/group_s")
    buffer = run.summary["buffer"]
    dropped = sum(buffer.get(f"buffer/dropped_{reason}", 0.0) for reason in ("failed", "zero_variance"))
    return Stages(
        train_s=float(np.mean(train)), train_cv=float(np.std(train) / np.mean(train)), sync_s=run.mean("time/push_s"),
        pushes=len(pushes) / max(1, len(steps)), pause_s=run.mean("push/pause_s"),
        handout_s=float(np.quantile(waits, 0.1)) if run.staleness and waits else 0.0,  # at 0 waits are for generation
        group_s=mean_s * (1 - paused / max(busy + paused, 1e-9)), group_cv=_group_cv(run),
        together=run.mean("rollout/concurrency"), in_flight=_in_flight(run),
        rollout_busy_s=busy * step_s,
        failed=dropped / max(1.0, dropped + buffer["buffer/trained"]),
    )


def _in_flight(run: Run) -> float:
    """The seconds of all groups over the run's. The metric rollout/in_flight is of single moments, whenever the worker
    gets to look: at staleness 0 on two cores its mean was .54 where groups had been in flight .42 of the time.
    """
    seconds = [
        group_s * sum(step.get(f"rollout/{end}") or 0.0 for end in ("groups", "failed", "aborted"))
        for step in run.steps[1:]
        if (group_s := step.get("rollout/group_s")) is not None
    ]
    return sum(seconds) / max(float(run.summary["seconds"]), 1e-9) / _concurrency(_config(run)) or math.nan


def _group_cv(run: Run) -> float:
    """Within a step: what all groups of a step have in common does not spread them."""
    variances, means = [], []
    for step in run.steps[1:]:
        mean, square = step.get("rollout/group_s"), step.get("rollout/group_s_squared")
        if mean is not None and square is not None:
            variances.append(max(0.0, square - mean**2))
            means.append(mean)
    return math.sqrt(float(np.mean(variances))) / float(np.mean(means)) if means else math.nan


def workload_of(found: Sequence[Stages], rules: Workload) -> Workload:
    """One workload from runs at several bounds; how durations grow with the load is a straight line through them.

    Between runs that were all equally loaded there is no line: then the engine counts as full (load_s = group_mean_s).

    Args:
        rules: sizes and rules of the runs (rules_of).
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
    """The workload with these runs' durations of training, push and hand-out."""
    return dataclasses.replace(
        workload, train_s=_mean(found, "train_s"), train_cv=_mean(found, "train_cv"), sync_s=_mean(found, "sync_s"),
        pause_s=_mean(found, "pause_s"), handout_s=_mean(found, "handout_s"),
    )


def _mean(found: Sequence[Stages], name: str) -> float:
    return float(np.mean([getattr(stage, name) for stage in found]))


@dataclass(frozen=True, slots=True)
class Measured:
    """A bound as it was measured, with what could have been."""

    staleness: int
    learner: float
    rollout: float
    staleness_mean: float
    bound: float
    """Largest sum of both pools' utilisations that the run's own stage times allow."""
    in_flight: float
    """Groups in flight over the concurrency."""
    predicted: Forecast | None
    """None where the simulator has not the run's rules, or nothing to go by."""


def work_conserving_bound(found: Stages, staleness: int) -> float:
    """Both pools' utilisations if nobody ever waited without need: in turn at staleness 0, else the slower of the two
    without a pause. Stage times are the run's own.
    """
    learner_s, rollout_s = found.train_s + found.pushes * found.sync_s, found.rollout_busy_s
    step_s = learner_s + rollout_s if staleness == 0 else max(learner_s, rollout_s + found.pushes * found.pause_s)
    return (found.train_s + found.rollout_busy_s) / step_s


def first_series(rows: Sequence[Row]) -> list[Row]:
    """Its rows, a bound each. Exact mode, whose rules are others, is left out."""
    bounded = [row for row in rows if not row.exact]
    return [row for row in bounded if row.series == bounded[0].series]


def compare(rows: Sequence[Row]) -> list[Measured]:
    """Of the first series, each bound beside its prediction: the simulator with the learner's and the push's durations
    of that bound, and one line of group durations over load through all bounds. What waits for what, and so both
    utilisations and the staleness, is the simulator's.
    """
    of_series = first_series(rows)
    if not of_series:
        return []
    found = {row.staleness: [stages(run) for run in row.runs] for row in of_series}
    together = _workload(of_series, [stage for stages in found.values() for stage in stages])
    measured = []
    for row in of_series:
        own = found[row.staleness]
        predicted = None
        if together is not None:
            steps = min(SIMULATED_STEPS, len(row.runs[0].steps))
            predicted = simulated(with_learner_of(together, own), row.staleness, steps)
        measured.append(
            Measured(
                staleness=row.staleness, learner=row.estimate("learner").mean, rollout=row.estimate("rollout").mean,
                staleness_mean=row.estimate("staleness_mean").mean,
                bound=float(np.mean([work_conserving_bound(stage, row.staleness) for stage in own])),
                in_flight=_mean(own, "in_flight"), predicted=predicted,
            )
        )
    return measured


def _workload(rows: Sequence[Row], found: Sequence[Stages]) -> Workload | None:
    """None without rules that can be simulated, or without durations of groups."""
    try:
        workload = workload_of(found, rules_of(rows[0].runs[0]))
    except ConfigError:
        return None
    return None if math.isnan(workload.group_mean_s) else workload


def rules_of(run: Run) -> Workload:
    """Sizes and rules from the run's config; its durations are none of the run's.

    Raises:
        ConfigError: rules that the simulator has not.
    """
    config = _config(run)
    for section, key, value in (("staleness", "late", "mask"), ("eval", "pin_version", True)):
        if config[section][key] == value:
            raise ConfigError(f"no prediction for {run.folder}: {section}.{key}={value} is not simulated")
    staleness, buffer, push = config["staleness"], config["buffer"], config["weight_sync"]
    return Workload(
        concurrency=_concurrency(config), prompts_per_step=config["learner"]["prompts_per_step"],
        late=staleness["late"], max_uses=buffer["max_uses"], fresh_fraction=buffer["fresh_fraction"],
        every_steps=push["every_steps"], drain=push["on_update"] == "drain",
    )


def _concurrency(config: dict[str, Any]) -> int:
    """Groups in flight at most, over all servers."""
    return int(config["rollout"]["concurrency"] * config["placement"]["rollout"]["servers"])


def _config(run: Run) -> dict[str, Any]:
    import yaml

    config: dict[str, Any] = yaml.safe_load((run.folder / "config.yaml").read_text())
    return config
