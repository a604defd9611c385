"""Runs of the three stages with and without the guard: how they are read, told and gone on with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from async_rl.config.loading import load_config
from async_rl.storage.guard_events import GuardEvent, add_guard_event
from benchmarks.over_optimisation import (
    KINDS,
    ROOT,
    WITH_GOLD,
    WITHOUT,
    first_troubles,
    guard_table,
    is_over,
    kept,
    numbers_of,
    read_curve,
    read_curves,
    summary,
    trouble_table,
)
from benchmarks.reward_curves import Curve
from tests.kit.reward_curves import gao

GUARDED = "no penalty, guard"
PPO = ROOT / "configs" / "rlhf" / "ppo.yaml"


def guarded(end: float, ends_at: int = 0) -> Curve:
    """A run that rose from -1 to 3, went back at 1, and ended with a gold of `end`."""
    first = np.array([-1.0, 1.0, 3.0, 2.0, 1.0])
    gold = np.array([-1.0, 1.0, 3.0, 2.5, end])
    return Curve(GUARDED, 0, np.arange(5.0), np.arange(5.0), gold, ((5, 3),), ends_at, first)


def test_a_run_that_falls_is_told_from_one_that_does_not() -> None:
    lines = summary([gao(3.0, 2.0), gao(2.0, 0.1, "ppo.yaml")]).splitlines()
    assert len(lines) == 2 + 4  # the other lines say what the guard would have found
    assert "no penalty, 1 seeds" in lines[0] and "in 1 it lost more than half of its gain" in lines[0]
    assert "It ended above its start in 1; in 0 it lost" in lines[1]
    assert not guard_table([gao(3.0, 2.0)]).rows


def test_the_guard_is_measured_by_the_best_that_its_run_was_before() -> None:
    never = replace(gao(3.0, 2.0, GUARDED), seed=3)
    curves = [guarded(2.8), guarded(4.0), guarded(0.0, ends_at=5), never, gao(3.0, 2.0)]
    assert [kept(each) for each in curves[:3]] == pytest.approx([0.95, 1.25, 0.25])
    last = next(line for line in summary(curves).splitlines() if "went back" in line)
    assert "3 of 4 runs went back, from a gold of 1.00 in the mean. They ended with 2.27, with at least 0.9" in last
    assert "before in 2, and above that in 1; 2 trained to the last step." in last
    rows = guard_table(curves).rows
    assert rows[0][1:] == ["0", "-1.00", "3.00", "1.00", "2.80", "0.95", "5 to 3", "step 5"]
    assert rows[2][-1] == "version 5, by the guard" and rows[3][-2:] == ["never", "step 200"] and len(rows) == 4


def test_the_first_trouble_is_measured_by_the_gain_of_the_version_to_go_back_to() -> None:
    acted = replace(guarded(2.8), troubles={WITH_GOLD: (5, 2, "gold_fall")})
    gold = np.array([0.0] * 20 + [2.0] * 20 + [-1.0] * 20)
    free = replace(gao(3.0, 2.0), gold=gold, troubles={WITHOUT: (45, 38, "kl, cut")})
    assert trouble_table([acted, free]).rows == [
        # means over up to two steps on each side: 5/4 at version 2, and 2 at the last; from -1 that is 9/4 of 3
        [GUARDED, "0", "5", "gold_fall", "2", "0.75", "-", "-", "-", "-"],
        # over five on each side: 2 at its highest, and of 8 steps with 2 and 3 with -1 13/11 at version 38
        ["no penalty", "0", "-", "-", "-", "-", "45", "kl, cut", "38", "0.59"],
    ]
    lines = summary([acted, free, replace(free, troubles={})]).splitlines()
    assert lines[-2] == "- no penalty, the guard with gold labels: trouble in 0 of 2."
    assert lines[-1].startswith("- no penalty, the guard without: trouble in 1 of 2. The version to go back to has at")


def test_troubles_of_a_run_that_only_warns_are_found_in_its_metrics(tmp_path: Path) -> None:
    """From step 21 on two kinds of signals are beyond their limits, and gold falls with the evaluation of step 30."""
    records = []
    for step in range(1, 41):
        is_bad = step > 20
        records.append({"step": step, "batch/episodes": 64, "response/length_mean": 30.0 if is_bad else 10.0,
                        "response/distinct_fraction": 0.4 if is_bad else 0.9, "nothing": None})  # fmt: skip
        if step % 5 == 0:
            gold = -9.0 if step >= 30 else 1.0
            records.append({"step": step, "eval/gold": gold, "eval/gold_squared": gold**2 + 1, "eval/gold_labels": 64})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    found = first_troubles(tmp_path)
    assert found[WITHOUT] == (25, 10, "longer, repetition")
    assert found[WITH_GOLD] == (30, 10, "longer, repetition, gold_fall")


def line(step: int, gold: float, at_s: float = 0.0) -> str:
    values = {"reward/mean": 2.0 * step, "reward/rule_mean": gold, "kl/reference": 0.1,
              "response/length_mean": 5.0 * step, "time/written_at_s": at_s}  # fmt: skip
    return json.dumps({"step": step, **values}) + "\n"


def test_a_curve_is_read_from_the_metrics_of_a_run(tmp_path: Path) -> None:
    evaluation = json.dumps({"step": 0, "eval/reward": 1.0}) + "\n"
    (tmp_path / "metrics.jsonl").write_text(evaluation + "".join(line(step, 1.0) for step in range(1, 8)))
    curve = read_curve(tmp_path, "ppo.yaml", 3)
    assert curve.kl.tolist() == pytest.approx([1.0, 1.25, 1.5, 2.0, 2.5, 2.75, 3.0])  # means over up to five steps
    assert curve.proxy.tolist() == pytest.approx([4.0, 5.0, 6.0, 8.0, 10.0, 11.0, 12.0])
    assert curve.gold.tolist() == pytest.approx([1.0] * 7)
    assert (curve.rollbacks, curve.ends_at, len(curve.first_gold)) == ((), 0, 0)


def test_a_curve_ends_with_the_version_the_guard_keeps_and_knows_what_was_discarded(tmp_path: Path) -> None:
    """The run trained 6 steps, went back to 3 and from 5 to 2, and was ended at 7 with version 4."""
    for kind, version, back_to in (("rollback", 6, 3), ("resumed", 6, 3), ("rollback", 5, 2), ("stop", 7, 4)):
        add_guard_event(tmp_path, GuardEvent(kind=kind, version=version, back_to=back_to))  # type: ignore[arg-type]
    first, second, third = ([line(step, gold, at_s + step) for step in range(1, 8)]
                            for gold, at_s in ((1.0, 0.0), (2.0, 100.0), (3.0, 200.0)))  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(first[:2] + third[2:]))
    (tmp_path / "metrics.lineage_0.jsonl").write_text("".join(first[3:]))  # with a step after the trouble
    (tmp_path / "metrics.lineage_1.jsonl").write_text("".join(first[2:3] + second[3:5]))
    curve = read_curve(tmp_path, GUARDED, 3)
    assert curve.gold.tolist() == pytest.approx([5 / 3, 2.0, 11 / 5, 13 / 5])
    assert (curve.rollbacks, curve.ends_at) == (((6, 3), (5, 2)), 4)
    assert curve.first_gold.tolist() == [1.0] * 6
    (tmp_path / "curves.json").write_text(json.dumps({"curves": [numbers_of(curve)]}))
    (again,) = read_curves(tmp_path / "curves.json")
    assert numbers_of(again) == numbers_of(curve) and again.rollbacks == curve.rollbacks


def test_a_run_that_a_rollback_has_ended_is_not_over(tmp_path: Path) -> None:
    assert not is_over(tmp_path)
    (tmp_path / "summary.json").write_text('{"steps": 30, "rolled_back": 15}')
    assert not is_over(tmp_path)
    (tmp_path / "summary.json").write_text('{"steps": 120}')
    assert is_over(tmp_path)


@pytest.mark.parametrize(("kind", "tighten"), [(GUARDED, "lr"), ("weak penalty, guard", "kl")])
def test_the_guard_of_the_benchmark_has_its_own_limits(kind: str, tighten: str) -> None:
    config, usual = load_config(PPO, KINDS[kind]), load_config(PPO)
    assert replace(config.guard, action="auto", tighten="kl") == usual.guard
    assert (config.guard_action, config.guard.tighten, config.eval.size) == ("rollback", tighten, 64)
    assert usual.algorithm.kl.coef == 4 * load_config(PPO, KINDS["weak penalty, guard"]).algorithm.kl.coef
