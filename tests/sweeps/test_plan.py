"""Measured stages, the workload fitted to them, predictions of steps, and the answers of `async-rl plan`."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from async_rl.base.errors import ConfigError
from async_rl.cli import parse
from async_rl.tools.sweeps.cells import bounds_of
from async_rl.tools.sweeps.plan import (
    Stages,
    answer,
    compare,
    describe_plan,
    make_plan,
    share_that_ends,
    stages,
    workload_of,
)
from async_rl.tools.sweeps.report import prediction
from async_rl.tools.sweeps.results import read_runs
from async_rl.tools.sweeps.settings import recommendation, settings_of
from buffer.simulate import Workload
from tests.kit.sweeps import WORKLOAD, make_sweep

pytestmark = pytest.mark.processes  # together they compute for long

OVERLAP = "--rollout-s 60 --train-s 40"


def plan(options: str, folder: Path | None = None) -> str:
    """The output of the command."""
    return answer(parse(["plan", *([str(folder)] if folder else []), *options.split()]))


def rows(text: str) -> dict[int, list[str]]:
    """[bound] step, learner, rollout, staleness and groups in flight of the table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {int(line[0]): line[1:] for line in lines if len(line) == 6 and line[0].isdecimal()}


def test_the_recommended_bound_is_the_smallest_that_is_fast() -> None:
    """With heavy tails every bound up to 8 helps."""
    heavy = make_plan(dataclasses.replace(Workload(), concurrency=16, prompts_per_step=16), bounds_of("0,2,8"))
    light = make_plan(dataclasses.replace(Workload(), group_cv=0.0), bounds_of("0,1,2,4"))
    assert (str(heavy.best), str(light.best)) == ("8", "1")
    assert "staleness.max = 1" in describe_plan(light)


def test_a_depth_is_nearly_as_fast_at_a_fraction_of_the_staleness() -> None:
    """64 groups a step whose durations vary by their mean: 12.1 s at 1.24, and 10.9 s at 7.3."""
    text = plan("--staleness 1,8,1.25/8 --train-s 10 --sync-s 0.5 --group-s 8 --cv 1")
    found = {line.strip("| ").split(" | ")[0]: line.strip("| ").split(" | ")[1:] for line in text.splitlines()}
    step_s, staleness = ({name: float(found[name][i]) for name in ("1", "1.25/8", "8")} for i in (0, 3))
    assert staleness["1"] < staleness["1.25/8"] < 1.3 and staleness["8"] > 7
    assert step_s["8"] < step_s["1.25/8"] < 1.15 * step_s["8"] < 0.5 * step_s["1"]
    assert "staleness.max = 8" in text


def test_two_durations_give_the_gain_of_overlap_and_every_bound() -> None:
    """A step takes 60 + 40 s in turn. The larger the bound, the closer it comes to 60 s."""
    text = plan(f"{OVERLAP} --staleness 0,1,8")
    of_bound = rows(text)
    assert list(of_bound) == [0, 1, 8]
    step_s, learner, row, *_ = of_bound[0]
    assert float(step_s) == pytest.approx(100, rel=0.01)
    assert [float(share.rstrip("%")) for share in (learner, row)] == pytest.approx([40, 60], abs=0.5)
    steps_s = [float(figures[0]) for figures in of_bound.values()]
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[-1] == pytest.approx(60, rel=0.06)


def test_durations_given_over_a_run_replace_its_own(sweep: Path) -> None:
    """A batch of 16 groups in 8 s on a full engine: .5 s a group. The learner's .4 s stay."""
    text = plan("--rollout-s 8 --staleness 0,1", sweep)
    assert " 0.4 s " in text and text.count(" 0.5 s ") == 2
    assert float(rows(text)[0][0]) == pytest.approx(8 + 0.4 + 0.05, rel=0.02)
    assert recommendation(settings_of(read_runs(sweep))) in text.partition("\n")[0]
    assert plan("--late drop --staleness 0,1", sweep) != text


def test_the_time_of_a_batch_is_that_of_all_servers_together(tmp_path: Path) -> None:
    """A batch in 8 s, then .4 s of training and a push of .05 s, with as many servers as the run had."""
    workload = dataclasses.replace(WORKLOAD, servers=2)
    settings = ("placement.rollout.servers=2", "rollout.max_groups_in_flight=32")
    folder = make_sweep(tmp_path, (0,), seeds=1, workload=workload, overrides=settings)
    step_s = float(rows(plan("--rollout-s 8 --staleness 0", folder))[0][0])
    assert step_s == pytest.approx(8 + 0.4 + 0.05, rel=0.03)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("", "--train-s"), ("--train-s 40", "--group-s"), (f"{OVERLAP} --group-s 3", "--group-s"),
        (f"{OVERLAP} --staleness one", "^--staleness"), ("--rollout-s 0 --train-s 40", "^--rollout-s "),
    ],
)
def test_what_does_not_work_is_refused(options: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(options)


def test_a_bound_at_which_the_learner_would_wait_for_ever_is_left_out(tmp_path: Path) -> None:
    workload = dataclasses.replace(WORKLOAD, every_steps=2)
    sweep = make_sweep(tmp_path, (1, 3), seeds=1, workload=workload, overrides=("weight_sync.every_steps=2",))
    text = plan("--staleness 0,1,3", sweep)
    assert list(rows(text)) == [1, 3]
    with pytest.raises(ConfigError, match=r"^--staleness .*'0'"):
        plan("--staleness 0", sweep)


def test_a_depth_that_the_runs_had_is_reported_and_planned(tmp_path: Path) -> None:
    """With 3 fresh groups of 4 a batch, depth 2.75 needs as many slots as depth 3: those of 3 batches."""
    workload = dataclasses.replace(WORKLOAD, prompts_per_step=4, every_steps=3, max_uses=2, fresh_fraction=0.75)
    rules = (
        "learner.prompts_per_step=4", "weight_sync.every_steps=3", "buffer.max_uses=2", "buffer.fresh_fraction=0.75"
    )
    sweep = make_sweep(tmp_path, ("2.75/4", 4), seeds=1, steps=12, workload=workload, overrides=rules)
    measured = compare(settings_of(read_runs(sweep)))
    assert [(str(m.staleness), m.predicted is not None) for m in measured] == [("2.75/4", True), ("4", True)]
    text = plan("--staleness 2.5/4,2.75/4,4", sweep)
    assert "\n| 2.75/4 |" in text and "| 2.5/4 |" not in text


def test_runs_of_one_step_are_left_out_of_a_plan_and_refused_alone(tmp_path: Path) -> None:
    folder = make_sweep(tmp_path, (1,), seeds=2)
    first, second = sorted((folder / "cells").iterdir())
    lines = (first / "metrics.jsonl").read_text().splitlines(keepends=True)
    (first / "metrics.jsonl").write_text("".join(lines[:2]))  # it had one step
    assert " 0.4 s " in plan("", folder)
    shutil.rmtree(second)
    with pytest.raises(ConfigError, match=str(folder)):
        plan("", folder)



def stage(together: float, group_s: float) -> Stages:
    return Stages(
        train_s=2.0, train_cv=0.1, sync_s=0.5, pause_s=0.4, receive_s=0.1, group_s=group_s, group_cv=0.2,
        together=together, failed=0.0,
    )

RULES = Workload(concurrency=64, prompts_per_step=16, late="drop", every_steps=2)


def test_the_slope_of_durations_over_the_load_is_found_or_the_engine_counts_as_full() -> None:
    workload = workload_of([stage(11, 2.0), stage(21, 3.0), stage(31, 4.0)], RULES)
    assert (workload.load_s, workload.group_mean_s) == pytest.approx((0.1, 1.0))
    assert workload.group_s(31) == pytest.approx(4.0)
    full = workload_of([stage(20, 2.0)], RULES, [dataclasses.replace(stage(9, 9.0), train_s=7.0, sync_s=3.0)])
    assert full.load_s == pytest.approx(0.1) and full.group_s(20) == pytest.approx(2.0)
    assert (full.train_s, full.sync_s, full.group_cv) == (7.0, 3.0, 0.2), "its own learner"
    assert (full.late, full.every_steps, full.prompts_per_step) == ("drop", 2, 16)


@pytest.mark.parametrize(("workload", "learner"), [(Workload(), 0.37), (Workload(late="drop"), 0.76)])
def test_a_sweep_is_predicted_with_its_own_late_policy(tmp_path: Path, workload: Workload, learner: float) -> None:
    """The values are for bound 1; a plain simulation also finds .76 with dropped groups."""
    sizes = ("rollout.max_groups_in_flight=64", "learner.prompts_per_step=64", f"staleness.on_late={workload.late}")
    sweep = make_sweep(tmp_path, (1, 4), seeds=1, steps=100, workload=workload, overrides=sizes)
    at_1 = compare(settings_of(read_runs(sweep)))[0]
    assert at_1.predicted is not None
    assert at_1.predicted.utilisation == pytest.approx(learner, abs=0.04)


def test_a_run_is_told_what_other_numbers_of_servers_would_bring(tmp_path: Path) -> None:
    """Two full servers sample 2 / .4 = 5 groups a second, so 16 take 3.2 s; the learner takes 1 s.

    Four servers take 1.6 s and six 1.07 s, where the learner is busy all the time. If the engine had room, more
    servers would change nothing: the 32 slots of bound 1 are in flight already.
    """
    workload = Workload(
        concurrency=64, servers=2, prompts_per_step=16, train_s=1.0, sync_s=0.0, group_mean_s=0.4, load_s=0.4,
        group_cv=0.0,
    )
    settings = ("placement.rollout.servers=2", "rollout.max_groups_in_flight=32")
    text = plan("--staleness 1", make_sweep(tmp_path, (1,), seeds=1, steps=60, workload=workload, overrides=settings))
    found = [line.strip("| ").split(" | ") for line in text.splitlines() if "servers" in line or "learner" in line]
    steps = {row[0]: [float(each) for each in row[1].split(" to ")] for row in found if row[0][:1].isdecimal()}
    assert list(steps) == ["1", "2 (now)", "3", "4", "5", "6"]
    assert (steps["1"][0], steps["2 (now)"][0]) == pytest.approx((60 / 6.4, 60 / 3.2), rel=0.05)
    assert steps["4"][-1] == pytest.approx(60 / 1.6, rel=0.05)
    assert steps["4"][0] == pytest.approx(steps["2 (now)"][0], rel=0.05)
    assert steps["6"][-1] == pytest.approx(60 / 1.07, rel=0.1)
    assert [row[-1] for row in found if row[0].startswith("2")] == ["servers or slots (staleness.depth)"]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("eval.pin_version=true", "eval.every_steps=5"), r"eval\.pin_version"),
        (("task.name=", "task.env=my_games:Game", "rollout.max_episode_tokens=2000"), "turns"),
        (("staleness.mode=exact", "weight_sync.on_update=drain"), "staleness.mode=bounded"),
    ],
)  # fmt: skip
def test_what_can_not_be_simulated_is_neither_predicted_nor_planned(
    tmp_path: Path, overrides: tuple[str, ...], why: str
) -> None:
    sweep = make_sweep(tmp_path, (0, 1), seeds=1, steps=12, overrides=overrides)
    measured = compare(settings_of(read_runs(sweep)))
    assert [m.predicted for m in measured] == ([] if "exact" in overrides[0] else [None, None])
    if measured:
        table = prediction(measured)
        assert table is not None and table.rows[0][2] == "-"
    with pytest.raises(ConfigError, match=why):
        plan("", sweep)


def test_the_first_step_after_a_resume_is_in_no_duration_as_that_of_the_start(tmp_path: Path) -> None:
    """Its training takes a hundred times as long, and so do its groups."""
    run = read_runs(make_sweep(tmp_path, (1,), seeds=1, steps=12))[0]
    whole = [dict(step) for step in run.steps]
    again = {**whole[6], "time/since_first_step_s": 0.0, "time/train_s": 40.0, "rollout/group_s": 40.0}
    resumed = dataclasses.replace(run, steps=[*whole[:6], again, *whole[7:]])
    without = dataclasses.replace(run, steps=[*whole[:6], *whole[7:]])
    assert stages(resumed) == stages(without)
    only_starts = dataclasses.replace(run, steps=[whole[0], again])
    (measured,) = compare(settings_of([only_starts]))
    assert measured.predicted is None


@pytest.mark.parametrize(
    ("bound", "on_update", "is_paused"), [(1, "retract", True), (0, "retract", False), (1, "drain", False)]
)
def test_the_pauses_of_pushes_are_in_no_group_where_none_is_in_flight(
    tmp_path: Path, bound: int, on_update: str, is_paused: bool
) -> None:
    """A busy time of .6 and pauses of .2 of the time: three quarters of a group's time were running, or all of it."""
    settings = (f"weight_sync.on_update={on_update}",)
    run = read_runs(make_sweep(tmp_path, (bound,), seeds=1, steps=12, overrides=settings))[0]
    group_s = run.steps[-1]["rollout/group_s"]
    assert group_s is not None
    run.summary.update({"utilisation/rollout": 0.6, "utilisation/rollout/sync": 0.2})
    assert stages(run).group_s == pytest.approx(group_s * (0.75 if is_paused else 1.0))


@pytest.mark.parametrize("cv", [0.0, 0.3, 1.5])
def test_the_share_of_groups_that_end_in_time_is_met_at_random_moments(cv: float) -> None:
    rng, mean_s, within_s = np.random.default_rng(0), 20.0, 30.0
    sigma = np.sqrt(np.log(1 + cv**2))
    durations = rng.lognormal(np.log(mean_s) - sigma**2 / 2, sigma, 400_000)
    ends = np.cumsum(durations)
    moments = rng.uniform(0, ends[-1], 100_000)
    left_s = ends[np.searchsorted(ends, moments)] - moments
    assert share_that_ends(mean_s, cv, within_s) == pytest.approx((left_s <= within_s).mean(), abs=0.01)
