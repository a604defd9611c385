"""What each staleness bound will cost and bring in time: closed form and simulation, from durations.

The learner trains a batch in T, pushes in S, receives a batch that is ready in H. A group with n in flight takes
D(n) = group_mean_s + load_s (n - 1). A step needs N = B / (1 - failed) groups, of which at most
n = min(K, (bound + 1) B) are in flight. With R the time that the N groups of one batch take when started together:

    step(bound) = max(T + S + H,  N D(n) / n + pause,  (R + T + S + H) / (bound + 1))
    learner = T / step        rollout = min(1 - pause / step, R / step)

The three terms: the learner alone, the rollout pool alone at its best throughput, and a group's whole way round with
bound + 1 batches on it. It is a lower bound of the step; the simulation adds what chance does to it.
Source: asymptotic bounds of closed queueing networks, Denning and Buzen 1978, "The operational analysis of queueing
network models".
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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
    occupancy: float
    """Groups in flight over the concurrency."""
    staleness: float
    """Mean, at the end of a warm run."""


def closed_form(workload: Workload, bound: int) -> Forecast:
    w = workload
    groups = w.prompts_per_step / (1 - w.failed)
    in_flight = min(w.concurrency, (bound + 1) * w.prompts_per_step)
    together_s = batch_seconds(w)
    learner_s = w.train_s + (w.sync_s / w.every_steps) + w.handout_s
    pause_s = w.standstill_s / w.every_steps
    rollout_s = groups * w.group_s(in_flight) / in_flight + pause_s
    round_s = (together_s + learner_s) / (bound + 1)
    step_s = max(learner_s, rollout_s, round_s)
    running = min(groups * w.group_s(in_flight) / step_s, in_flight)
    return Forecast(
        step_s=step_s, learner=w.train_s / step_s, rollout=min(1 - pause_s / step_s, together_s / step_s),
        occupancy=running / w.concurrency, staleness=_mean_staleness(w, bound, step_s, rollout_s),
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
    result = simulate(workload, bound, steps, seed)
    return Forecast(result.step_s, result.utilisation, result.rollout, result.occupancy, result.mean_staleness)


@dataclass(frozen=True, slots=True)
class Stages:
    """Mean durations of one run."""

    train_s: float
    train_cv: float
    sync_s: float
    pause_s: float
    handout_s: float
    group_s: float
    """Of a group in flight, standstill in pushes not counted."""
    group_cv: float
    in_flight: float
    """Groups in flight together, as a group saw it."""
    rollout_busy_s: float
    """At least one group in flight, for each step."""
    eval_s: float
    """Held-out evaluation on the rollout pool, for each step."""
    failed: float


def stages(run: Run) -> Stages:
    """nan for what the run did not measure."""
    train = [value for step in run.steps[1:] if (value := step.get("time/train_s")) is not None]
    waits = [value for step in run.steps[1:] if (value := step.get("time/wait_data_s")) is not None]
    step_s = float(run.summary["seconds"]) / max(1, len(run.steps) - 1)
    busy, paused, evaluating = (
        float(run.summary.get(f"utilisation/rollout{state}", math.nan)) for state in ("", "/sync", "/eval")
    )
    mean_s = run.mean("rollout/group_s")
    buffer = run.summary["buffer"]
    dropped = sum(buffer.get(f"buffer/dropped_{reason}", 0.0) for reason in ("failed", "zero_variance"))
    return Stages(
        train_s=float(np.mean(train)), train_cv=float(np.std(train) / np.mean(train)), sync_s=run.mean("time/sync_s"),
        pause_s=run.mean("push/pause_s"),
        handout_s=0.0 if run.staleness == 0 else float(np.quantile(waits, 0.1)),  # at 0 every wait is for generation
        group_s=mean_s * (1 - paused / max(busy + paused + evaluating, 1e-9)), group_cv=_group_cv(run),
        in_flight=run.mean("rollout/concurrency"), rollout_busy_s=busy * step_s, eval_s=evaluating * step_s,
        failed=dropped / max(1.0, dropped + buffer["buffer/trained"]),
    )


def _group_cv(run: Run) -> float:
    """Within a step: what all groups of a step have in common does not spread them."""
    variances, means = [], []
    for step in run.steps[1:]:
        mean, square = step.get("rollout/group_s"), step.get("rollout/group_s_squared")
        if mean is not None and square is not None:
            variances.append(max(0.0, square - mean**2))
            means.append(mean)
    return math.sqrt(float(np.mean(variances))) / float(np.mean(means)) if means else math.nan


def workload_of(found: Sequence[Stages], prompts_per_step: int, concurrency: int) -> Workload:
    """One workload from runs at several bounds; how durations grow with the load is a straight line through them.

    Between runs that were all equally loaded there is no line: then the engine counts as full (load_s = group_mean_s).
    """
    load = np.array([stage.in_flight for stage in found])
    durations = np.array([stage.group_s for stage in found])
    load_s = float(np.mean(durations / load))
    if len(found) > 1 and load.std() > 0.1 * load.mean():
        load_s = float(np.clip(np.polyfit(load, durations, 1)[0], 0.0, load_s))
    alone_s = float(np.mean(durations - load_s * (load - 1)))

    workload = Workload(
        concurrency=concurrency, prompts_per_step=prompts_per_step, group_mean_s=float(np.maximum(alone_s, 1e-6)),
        load_s=load_s,
        group_cv=_mean(found, "group_cv"), failed=_mean(found, "failed"),
    )
    return with_learner_of(workload, found)


def with_learner_of(workload: Workload, found: Sequence[Stages]) -> Workload:
    """The workload with these runs' durations of training, push and hand-out."""
    sync_s = _mean(found, "sync_s")
    return dataclasses.replace(
        workload, train_s=_mean(found, "train_s"), train_cv=_mean(found, "train_cv"), sync_s=sync_s,
        pause_s=min(_mean(found, "pause_s"), sync_s), handout_s=_mean(found, "handout_s"),
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
    predicted: Forecast | None


def work_conserving_bound(found: Stages, staleness: int) -> float:
    """Both pools' utilisations if nobody ever waited without need: in turn at staleness 0, else the slower of the two
    without a pause. Stage times are the run's own.
    """
    learner_s, rollout_s = found.train_s + found.sync_s, found.rollout_busy_s + found.eval_s
    step_s = learner_s + rollout_s if staleness == 0 else max(learner_s, rollout_s + found.pause_s)
    return (found.train_s + found.rollout_busy_s) / step_s


def compare(rows: Sequence[Row]) -> list[Measured]:
    """Of the first series, each bound beside its prediction: the simulator with the learner's and the push's durations
    of that bound, and one line of group durations over load through all bounds. What waits for what, and so both
    utilisations and the staleness, is the simulator's. Exact mode, whose rules are others, is left out.
    """
    bounded = [row for row in rows if not row.exact]
    of_series = [row for row in bounded if row.series == bounded[0].series]
    if not of_series:
        return []
    found = {row.staleness: [stages(run) for run in row.runs] for row in of_series}
    together = workload_of([stage for stages in found.values() for stage in stages], *sizes(of_series[0].runs[0]))
    measured = []
    for row in of_series:
        own = found[row.staleness]
        workload = with_learner_of(together, own)
        predicted = None
        if not math.isnan(workload.group_mean_s):
            predicted = simulated(workload, row.staleness, min(SIMULATED_STEPS, len(row.runs[0].steps)))
            generating = float(np.mean([s.rollout_busy_s / (s.rollout_busy_s + s.eval_s) for s in own]))
            predicted = dataclasses.replace(predicted, rollout=predicted.rollout * generating)
        measured.append(
            Measured(
                row.staleness, row.estimate("learner").mean, row.estimate("rollout").mean,
                row.estimate("staleness_mean").mean,
                float(np.mean([work_conserving_bound(stage, row.staleness) for stage in own])), predicted,
            )
        )
    return measured


def sizes(run: Run) -> tuple[int, int]:
    """(groups a step, groups in flight at most over all servers) from the run's config."""
    import yaml

    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    servers = config["placement"]["rollout"]["servers"]
    return config["learner"]["prompts_per_step"], config["rollout"]["concurrency"] * servers
