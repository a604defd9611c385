"""Compares the policies for late groups, `staleness.late: wait | drop | mask`, by simulating a run's own episodes.

With `wait`, the learner of episodes with long tails may spend much of its time waiting for groups that expire. The
simulator says what the other policies would have brought, and at which price: dropped groups are longer than others,
and with `mask` old tokens are not trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from async_rl.errors import AsyncRLError
from benchmarks.prediction import SIMULATED_STEPS, first_series, rules_of, stages, workload_of
from benchmarks.results import Row, Run, read_runs
from benchmarks.simulate import Policy, Result, Workload, mean_result, simulate
from benchmarks.tables import Table

POLICIES: tuple[Policy, ...] = ("wait", "drop", "mask")
CAUTION_SHARE = 0.1
"""A run is cautioned if its learner waited for late groups for more than this share of its time."""
WORTH_TELLING = 5e-4
"""If a smaller share of the groups is dropped, nothing is said of their lengths."""


def compare_policies(workloads: Sequence[Workload], bound: int, steps: int) -> dict[str, Result]:
    """Simulate runs of `steps` steps with each policy for late groups, and return the mean results by policy."""
    return {
        late: mean_result([simulate(dataclasses.replace(each, late=late), bound, steps) for each in workloads])
        for late in POLICIES
    }


def policy_table(found: dict[int, dict[str, Result]]) -> Table | None:
    """Return the Table of simulated results {bound: {policy for late groups: result}}; None if there are none."""
    header = (
        "staleness.max", "staleness.late", "steps per minute", "learner", "groups dropped", "their length / mean",
        "their duration / mean", "tokens masked",
    )  # fmt: skip
    lines = [[str(bound), late, *_texts(late, r)] for bound, results in found.items() for late, r in results.items()]
    return Table(header, lines, "Late groups: predicted with each policy") if lines else None


def _texts(late: str, r: Result) -> list[str]:
    bias = [f"{r.dropped_length:.2f}", f"{r.dropped_duration:.2f}"] if r.dropped >= WORTH_TELLING else ["-", "-"]
    masked = f"{r.masked:.1%}" if late == "mask" else "-"
    return [f"{60 / r.step_s:.1f}", f"{r.utilisation:.1%}", f"{r.dropped:.1%}", *bias, masked]


def policies_of_rows(rows: Sequence[Row]) -> Table | None:
    """Return the table of a sweep's first series, each run simulated by its own episodes; None if it has none.

    Bound 0 is left out, at which no group is ever late.
    """
    found = {}
    for row in first_series(rows):
        workloads = [workload for run in row.runs if (workload := _episodes_of(run))]
        if row.staleness and workloads:
            found[row.staleness] = compare_policies(workloads, row.staleness, _steps(row.runs[0]))
    return policy_table(found)


def caution(run_dir: Path) -> str:
    """Return a sentence on what waiting for late groups has cost a finished run, and the other policies would have.

    It is empty unless the run has episodes of several turns and waited for late ones for more than CAUTION_SHARE of its
    time; also if the run took no two steps or can't be simulated.
    """
    try:
        (run,) = read_runs(run_dir)
        if len(run.steps) < 2:
            return ""
        waited_s = sum(step.get("buffer/waited_for_late_s") or 0.0 for step in run.steps[1:])
        share = waited_s / float(run.summary["seconds"])
        if share <= CAUTION_SHARE or (workload := _episodes_of(run)) is None or workload.late != "wait":
            return ""
        found = compare_policies([workload], run.staleness, _steps(run))
    except AsyncRLError:  # the simulator does not cover every run
        return ""
    wait, drop, mask = (found[late] for late in POLICIES)
    return (
        f"caution: the learner waited for late episodes for {share:.0%} of its time (staleness.late: wait). Simulated "
        f"with this run's durations, wait gives {_speed(wait)}; drop gives {_speed(drop)} and drops {drop.dropped:.0%} "
        f"of the groups{_bias(drop)}; mask gives {_speed(mask)} and masks {mask.masked:.0%} of the tokens."
    )


def _speed(result: Result) -> str:
    return f"{60 / result.step_s:.1f} steps a minute with the learner at {result.utilisation:.0%}"


def _bias(result: Result) -> str:
    if result.dropped < WORTH_TELLING:
        return ""
    return f", {result.dropped_length:.1f} times as long and {result.dropped_duration:.1f} times as slow as the mean"


def _episodes_of(run: Run) -> Workload | None:
    """Return the workload of a run of episodes of several turns; None if it is another, or can't be simulated."""
    found = stages(run)
    if run.exact or not found.groups:
        return None
    try:
        return workload_of([found], rules_of(run))
    except AsyncRLError:
        return None


def _steps(run: Run) -> int:
    return min(SIMULATED_STEPS, len(run.steps))
