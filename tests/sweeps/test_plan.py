"""Answers and errors of `async-rl plan`."""

from __future__ import annotations

import argparse
import dataclasses
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from async_rl.base.errors import ConfigError
from async_rl.cli import add_command
from async_rl.tools.sweeps.cells import bounds_of
from async_rl.tools.sweeps.commands import add_sweeps
from async_rl.tools.sweeps.plan import answer, compare, describe_plan, make_plan, measured_workload
from async_rl.tools.sweeps.results import read_runs
from async_rl.tools.sweeps.settings import recommendation, settings_of
from buffer.simulate import Workload, simulate
from tests.kit.sweeps import WORKLOAD, make_sweep

OVERLAP = "--rollout-s 60 --train-s 40"


def plan(options: str, folder: Path | None = None) -> str:
    """The output of the command."""
    parser = argparse.ArgumentParser()
    add_sweeps(partial(add_command, parser.add_subparsers()), lambda command: None)
    return answer(parser.parse_args(["plan", *([str(folder)] if folder else []), *options.split()]))


def test_the_examples_in_the_help_are_understood() -> None:
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers()
    add_sweeps(partial(add_command, commands), lambda command: None)
    for name in ("report", "plan"):
        (example,) = re.findall(r"example: async-rl (.+)", commands.choices[name].description or "")
        parser.parse_args(example.split())


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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("", "--train-s"), ("--rollout-s 60", "--train-s"), ("--train-s 40", "--group-s"),
        (f"{OVERLAP} --group-s 3", "--group-s"), (f"{OVERLAP} --load-s 3", "--load-s"),
        (f"{OVERLAP} --staleness one", "^--staleness"), ("--rollout-s 0 --train-s 40", "^--rollout-s .*got 0.0"),
        ("--group-s 60 --train-s -1", "^--train-s .*got -1.0"), (f"{OVERLAP} --cv -1", "^--cv .*got -1.0"),
    ],
)
def test_what_does_not_work_is_refused(options: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        plan(options)


def test_a_sweeps_plan_meets_the_measured_utilisation_of_the_rollout_pool(sweep: Path) -> None:
    """The runs come from the simulator."""
    workload = measured_workload(settings_of(read_runs(sweep)), sweep)
    for run in read_runs(sweep):
        found = simulate(workload, run.staleness.max, 150)
        assert found.rollout == pytest.approx(run.summary["utilisation/rollout"], rel=0.1)


def test_a_sweeps_plan_begins_with_the_recommendation_of_its_report(sweep: Path) -> None:
    rows_of_sweep = settings_of(read_runs(sweep))
    text = plan("--staleness 0,1,3", sweep)
    assert recommendation(rows_of_sweep) in text.partition("\n")[0]


def test_a_bound_at_which_the_learner_would_wait_for_ever_is_left_out(tmp_path: Path) -> None:
    workload = dataclasses.replace(WORKLOAD, every_steps=2)
    sweep = make_sweep(tmp_path, (1, 3), seeds=1, workload=workload, overrides=("weight_sync.every_steps=2",))
    text = plan("--staleness 0,1,3", sweep)
    assert list(rows(text)) == [1, 3]
    assert "weight_sync.every_steps=2" in text
    with pytest.raises(ConfigError, match=r"^--staleness .*every_steps=2.*'0'"):
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


def test_a_sweep_that_drops_late_groups_is_planned_with_that_rule(tmp_path: Path) -> None:
    workload = dataclasses.replace(WORKLOAD, late="drop")
    sweep = make_sweep(tmp_path, (0, 1), seeds=1, workload=workload, overrides=("staleness.on_late=drop",))
    text = plan("--staleness 0,1", sweep)
    assert "staleness.on_late=drop" in text
    assert float(rows(text)[1][0]) > 0


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("eval.pin_version=true", "eval.every_steps=5"), r"eval\.pin_version"),
        (("staleness.mode=exact", "weight_sync.on_update=drain"), "staleness.mode=bounded"),
    ],
)
def test_a_run_that_can_not_be_simulated_is_refused_with_the_reason(
    tmp_path: Path, overrides: tuple[str, ...], why: str
) -> None:
    sweep = make_sweep(tmp_path, (1,), seeds=1, steps=12, overrides=overrides)
    with pytest.raises(ConfigError, match=why):
        plan("", sweep)
