"""Measured stages, the workload fitted to them, and what the simulator predicts from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from async_rl.base.errors import ConfigError
from async_rl.tools.sweeps.plan import Stages, compare, rules_of, stages, work_conserving_bound, workload_of
from async_rl.tools.sweeps.report import prediction
from async_rl.tools.sweeps.results import read_runs
from async_rl.tools.sweeps.settings import settings_of
from buffer.simulate import Workload, simulate
from tests.kit.sweeps import make_sweep

STEADY = Workload(
    concurrency=64, prompts_per_step=64, train_s=40.0, sync_s=0.0, group_mean_s=60.0, group_cv=0.0
)  # fmt: skip
"""60 s of generation, 40 s of learning."""


def test_simulation_of_a_60_40_split() -> None:
    """In turn the learner works 40 s of 100; overlapped, generation is the bottleneck: 40 s of 60."""
    at_0, at_1 = simulate(STEADY, 0, 150), simulate(STEADY, 1, 150)
    assert (at_0.step_s, at_0.utilisation, at_0.rollout) == pytest.approx((100, 0.4, 0.6), rel=0.02)
    assert (at_1.step_s, at_1.utilisation, at_1.rollout) == pytest.approx((60, 2 / 3, 1.0), rel=0.02)
    assert at_0.mean_staleness == 0.0
    assert at_1.mean_staleness == pytest.approx(1.0, rel=0.02)


def test_staleness_of_a_small_engine_stays_below_the_bound() -> None:
    """algorithms.md D2's generation-bound twin: mean staleness sticks at 0.7 whatever the bound."""
    twin = Workload(
        concurrency=16, prompts_per_step=32, train_s=1.5, sync_s=0.15, group_mean_s=3.65, group_cv=0.2
    )  # fmt: skip
    assert simulate(twin, 8, 150).mean_staleness == pytest.approx(0.7, abs=0.1)


def test_a_full_engine_gives_the_same_throughput_at_every_load() -> None:
    """load_s = group_mean_s: 32 groups alone take 32 * 0.1 s, 64 at once twice as long."""
    full = Workload(
        concurrency=64, prompts_per_step=32, train_s=1.0, sync_s=0.0, group_mean_s=0.1, load_s=0.1, group_cv=0.0
    )  # fmt: skip
    assert simulate(full, 0, 20).step_s == pytest.approx(4.2)
    assert simulate(full, 1, 400).step_s == pytest.approx(3.2, rel=0.02)


def test_the_simulated_rollout_pool_is_busy_while_a_group_is_in_flight() -> None:
    result = simulate(dataclasses.replace(STEADY, sync_s=5.0), 0, 50)
    assert result.step_s == pytest.approx(105)
    assert result.rollout == pytest.approx(60 / 105)
    assert result.in_flight == pytest.approx(60 / 105)  # all 64 until the end of the batch


def test_dropped_groups_are_generated_all_the_same() -> None:
    full = Workload(
        concurrency=64, prompts_per_step=32, train_s=0.0, sync_s=0.0, group_mean_s=0.1, load_s=0.1, group_cv=0.0,
        failed=0.5,
    )  # fmt: skip
    assert simulate(full, 1, 400).step_s == pytest.approx(6.4, rel=0.05)


def stage(together: float, group_s: float, pushes: float = 1.0) -> Stages:
    return Stages(
        train_s=2.0, train_cv=0.1, sync_s=0.5, pushes=pushes, pause_s=0.4, receive_s=0.1, group_s=group_s, group_cv=0.2,
        together=together, rollout_busy_s=3.0, failed=0.0,
    )


RULES = Workload(concurrency=64, prompts_per_step=16, late="drop", every_steps=2)


def test_the_slope_of_durations_over_the_load_is_found() -> None:
    workload = workload_of([stage(11, 2.0), stage(21, 3.0), stage(31, 4.0)], RULES)
    assert (workload.load_s, workload.group_mean_s) == pytest.approx((0.1, 1.0))
    assert workload.group_s(31) == pytest.approx(4.0)


def test_without_different_loads_the_engine_counts_as_full() -> None:
    workload = workload_of([stage(20, 2.0)], RULES)
    assert workload.load_s == pytest.approx(0.1)
    assert workload.group_s(20) == pytest.approx(2.0)


def test_a_workload_keeps_the_rules() -> None:
    workload = workload_of([stage(20, 2.0)], RULES)
    assert (workload.late, workload.every_steps, workload.prompts_per_step) == ("drop", 2, 16)


def test_the_work_conserving_bound_is_in_turn_at_0_and_the_slower_pool_above() -> None:
    found = stage(20, 2.0)  # learner 2 s + 0.5 s push, rollout busy 3 s and paused 0.4 s
    assert work_conserving_bound(found, 0) == pytest.approx(5 / 5.5)
    assert work_conserving_bound(found, 4) == pytest.approx(5 / 3.4)


def test_a_push_every_other_step_counts_half_in_the_work_conserving_bound() -> None:
    found = stage(20, 2.0, pushes=0.5)
    assert work_conserving_bound(found, 0) == pytest.approx(5 / 5.25)
    assert work_conserving_bound(found, 4) == pytest.approx(5 / 3.2)


ROOMY = dataclasses.replace(STEADY, concurrency=128)


def test_with_a_push_every_other_step_a_round_has_two_trainings_on_it() -> None:
    """At bound 1 both batches start at a push: 60 s of generation, 2 * 40 of training, 10 of pushing, for 2 steps."""
    workload = dataclasses.replace(ROOMY, sync_s=10.0, every_steps=2)
    assert simulate(workload, 1, 150).step_s == pytest.approx(75, rel=0.01)


def test_a_push_that_drains_waits_for_the_groups_in_flight() -> None:
    """In place, two batches share a round of 60 + 40 s. With drain, the batch that started at a push is what the next
    push waits for.
    """
    assert simulate(ROOMY, 1, 150).step_s == pytest.approx(50, rel=0.01)
    assert simulate(dataclasses.replace(ROOMY, drain=True), 1, 150).step_s == pytest.approx(60, rel=0.01)


def test_groups_used_twice_halve_the_step_of_a_slow_rollout_pool() -> None:
    slow = dataclasses.replace(STEADY, train_s=1.0)
    assert simulate(slow, 4, 150).step_s == pytest.approx(60, rel=0.01)
    twice = dataclasses.replace(slow, max_uses=2, fresh_fraction=0.5)
    assert simulate(twice, 4, 150).step_s == pytest.approx(30, rel=0.02)


def test_a_bound_that_would_stop_the_learner_for_ever_is_refused() -> None:
    """Two batches of 64 between pushes need 128 slots, which bound 1 has. Of 32 fresh ones bound 3 has as many."""
    every_other = dataclasses.replace(STEADY, every_steps=2)
    used_again = {"max_uses": 2, "fresh_fraction": 0.5}
    for workload, depth in (
        (every_other, 1), (dataclasses.replace(every_other, **used_again), 3),
        (dataclasses.replace(STEADY, max_uses=2, fresh_fraction=0.9), 1), (STEADY, 0),
    ):
        assert workload.slot_limits.smallest_depth == depth
    with pytest.raises(ConfigError, match=r"^staleness\.depth .*every_steps 2, got 0"):
        simulate(every_other, 0, 10)


def test_evaluation_while_no_group_is_in_flight_changes_no_prediction(tmp_path: Path) -> None:
    """Beside groups it is in what they take; else in time that nobody else needs."""
    sweep = make_sweep(tmp_path, (0, 1), seeds=1)
    without, evaluating = read_runs(sweep), read_runs(sweep)
    for run in evaluating:
        run.summary["utilisation/rollout/eval"] = 0.1
    assert compare(settings_of(evaluating)) == compare(settings_of(without))


HEAVY_TAILS = Workload()
DROP = dataclasses.replace(HEAVY_TAILS, late="drop")


@pytest.mark.parametrize(("workload", "learner"), [(HEAVY_TAILS, 0.37), (DROP, 0.76)])
def test_a_sweep_is_predicted_with_its_own_late_policy(tmp_path: Path, workload: Workload, learner: float) -> None:
    """The values are for bound 1; tests/buffer/test_dropping.py also finds .76 with dropped groups."""
    sizes = ("rollout.max_groups_in_flight=64", "learner.prompts_per_step=64", f"staleness.on_late={workload.late}")
    sweep = make_sweep(tmp_path, (1, 4), seeds=1, steps=100, workload=workload, overrides=sizes)
    at_1 = compare(settings_of(read_runs(sweep)))[0]
    assert at_1.predicted is not None
    assert at_1.predicted.utilisation == pytest.approx(learner, abs=0.04)


def test_every_policy_for_late_groups_keeps_the_bound() -> None:
    """With long tails the learner waits, unless late groups are dropped or their old tokens are masked."""
    for bound in (0, 1, 3):
        wait, drop, mask = (
            simulate(dataclasses.replace(HEAVY_TAILS, late=late), bound, 60)  # type: ignore[arg-type]
            for late in ("wait", "drop", "mask")
        )
        assert [found.max_staleness for found in (wait, drop, mask)] == [bound] * 3
        assert wait.dropped == mask.dropped == 0 < drop.dropped + (bound == 0)
        assert (min(drop.utilisation, mask.utilisation) > 1.2 * wait.utilisation) == (bound > 0)


def test_the_rules_are_those_of_the_runs_config(tmp_path: Path) -> None:
    overrides = (
        "placement.rollout.servers=2", "rollout.max_groups_in_flight=40", "weight_sync.every_steps=2",
        "buffer.max_uses=2",
        "buffer.fresh_fraction=0.6", "weight_sync.on_update=drain", "staleness.on_late=drop",
    )
    sweep = make_sweep(tmp_path, (4,), seeds=1, steps=12, overrides=overrides)
    assert rules_of(read_runs(sweep)[0]) == Workload(
        concurrency=80, prompts_per_step=16, every_steps=2, max_uses=2, fresh_fraction=0.6, drain=True, late="drop"
    )


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("eval.pin_version=true", "eval.every_steps=5"), r"eval\.pin_version"),
        (
            ("task.name=", "task.env=my_games:Game", "rollout.max_episode_tokens=2000"),
            "turns",
        ),
    ],
)
def test_what_can_not_be_simulated_is_not_predicted(tmp_path: Path, overrides: tuple[str, ...], why: str) -> None:
    sweep = make_sweep(tmp_path, (0, 1), seeds=1, steps=12, overrides=overrides)
    runs = read_runs(sweep)
    with pytest.raises(ConfigError, match=why):
        rules_of(runs[0])
    measured = compare(settings_of(runs))
    assert [m.predicted for m in measured] == [None, None]
    assert all(m.bound > 0 for m in measured)
    table = prediction(measured)
    assert table is not None and table.rows[0][2] == "-"


@pytest.mark.parametrize(("held_s", "is_predicted"), [(0.001, True), (100.0, False)])
def test_a_run_whose_pushes_waited_for_evaluations_is_not_predicted(
    tmp_path: Path, held_s: float, is_predicted: bool
) -> None:
    """As with checkpoint.keep_best, or a watcher that acts on gold rewards."""
    runs = read_runs(make_sweep(tmp_path, (0, 1), seeds=1, steps=12))
    for run in runs:
        run.steps[-1]["time/held_by_eval_s"] = held_s
    assert [m.predicted is not None for m in compare(settings_of(runs))] == [is_predicted] * 2
    if not is_predicted:
        with pytest.raises(ConfigError, match="time/held_by_eval_s"):
            rules_of(runs[0])


def test_a_run_whose_groups_were_reported_in_its_first_step_only_is_not_predicted(tmp_path: Path) -> None:
    """As in a run of a second: the spread of the durations, which is taken without that step, is unknown."""
    runs = read_runs(make_sweep(tmp_path, (0, 2), seeds=1, steps=12))
    for run in runs:
        for step in run.steps[1:]:
            step["rollout/group_s"] = step["rollout/group_s_squared"] = None
    assert [m.predicted for m in compare(settings_of(runs))] == [None, None]


def test_a_run_that_ended_after_its_first_step_leaves_the_predictions_alone(tmp_path: Path) -> None:
    rows = settings_of(read_runs(make_sweep(tmp_path, (0, 1), seeds=2, steps=12)))
    whole = compare(rows)
    del rows[1].runs[0].steps[1:]
    for before, found in zip(whole, compare(rows), strict=True):
        assert before.predicted is not None and found.predicted is not None
        assert found.predicted.utilisation == pytest.approx(before.predicted.utilisation, rel=0.05)
        assert found.bound == pytest.approx(before.bound, rel=0.05)
    del rows[1].runs[1].steps[1:]
    synchronous, other = compare(rows)
    assert synchronous.predicted is not None and other.predicted is None and np.isnan(other.bound)


def test_exact_mode_is_not_compared(tmp_path: Path) -> None:
    overrides = ("staleness.mode=exact", "weight_sync.on_update=drain")
    assert compare(settings_of(read_runs(make_sweep(tmp_path, (0, 1), seeds=1, steps=12, overrides=overrides)))) == []


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


def test_predictions_hold_no_nan() -> None:
    for bound in (0, 3):
        assert np.isfinite(dataclasses.astuple(simulate(Workload(), bound, 40))).all()
