from __future__ import annotations

import numpy as np
import pytest

from async_rl.config import Config
from async_rl.depth.window import KL_PER_VERSION, RecentWindow, receive_s, rules_of, without_load
from async_rl.messages.reports import GroupRecord
from tests.kit.configs import make_config
from tests.kit.depth.steps import step_values

CONFIG = make_config(
    staleness={"max": 8, "depth": "auto"}, learner={"prompts_per_step": 4}, rollout={"concurrency": 6},
    weight_sync={"every_steps": 2}, placement={"rollout": {"servers": 2}},
)


def records(load: float, at: tuple[int, int], number: int = 400, noise: float = 0.1) -> list[GroupRecord]:
    """Groups that take 0.02 s a token alone, and 1 + load (n - 1) times as long with n in flight."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(number):
        steps, n = int(rng.integers(10, 500)), float(rng.uniform(*at))
        seconds = 0.02 * steps * (1 + load * (n - 1)) * rng.lognormal(0, noise)
        made.append(GroupRecord(float(seconds), 0.0, steps, n))
    return made


def filled(config: Config = CONFIG) -> RecentWindow:
    window = RecentWindow(config)
    window.add_groups(records(0.0, (2, 4), 40))
    for version in range(1, 6):
        window.add_step(version, step_values(buffer__trained=4.0 * version, buffer__dropped_failed=2.0 * version))
    return window


@pytest.mark.parametrize("load", [0.0, 0.02, 0.3, 1.0])
def test_the_load_is_found_from_groups_that_met_more_and_fewer_others(load: float) -> None:
    found, times = without_load(records(load, (4, 60)), servers=1, paused=0.0)
    assert found == pytest.approx(load, rel=0.15, abs=0.003)
    assert sum(time.sampling_s for time in times) / sum(r.steps for r in records(load, (4, 60))) == pytest.approx(
        0.02, rel=0.15
    )


def test_where_all_groups_met_equally_many_half_the_time_is_taken_for_load() -> None:
    found, times = without_load(records(0.3, (10, 10), noise=0.3), servers=1, paused=0.0)
    assert found * 10 / (1 + found * 9) == pytest.approx(0.5)
    assert times[0].sampling_s == pytest.approx(records(0.3, (10, 10), noise=0.3)[0].sampling_s / (1 + found * 9))


def test_pauses_are_taken_out_of_sampling_and_not_out_of_waiting() -> None:
    load, times = without_load([GroupRecord(10.0, 5.0, 100, 1.0)] * 3, servers=1, paused=0.2)
    assert times[0] == pytest.approx((8.0, 5.0)) and load >= 0


def test_the_groups_of_all_servers_are_counted_together() -> None:
    """Half as many at each of two servers, each of which slows down twice as much for one more of its own."""
    one, _ = without_load(records(0.1, (4, 60)), servers=1, paused=0.0)
    halves = [record._replace(together=record.together / 2) for record in records(0.1, (4, 60))]
    two, _ = without_load(halves, servers=2, paused=0.0)
    assert two == pytest.approx(one)


def test_the_workload_has_the_rules_of_the_run_and_the_means_of_the_window() -> None:
    workload = filled().workload(servers=2)
    assert (workload.concurrency, workload.prompts_per_step, workload.every_steps) == (12, 4, 2)
    assert (workload.train_s, workload.train_cv, workload.sync_s, workload.pause_s) == (3.0, 0.0, 0.5, 0.25)
    assert workload.receive_s == pytest.approx(0.1)
    assert workload.failed == pytest.approx(2 / 6)  # in each step 2 dropped and 4 trained
    assert len(workload.groups) == 8 * 4  # the newest of 40
    assert workload.group_mean_s == pytest.approx(np.mean([group.sampling_s for group in workload.groups]))
    assert rules_of(CONFIG, 1).concurrency == 6


def test_the_wait_for_generation_is_no_time_to_receive_a_batch() -> None:
    """Nor is it where the learner waits in every step, as at depth 0 and where generation is the slower part."""
    steps: list[dict[str, float | None]] = [
        {"time/wait_data_s": waits, "buffer/waited_s": without}
        for waits, without in ((4.1, 4.0), (2.3, 2.0), (0.2, 0.0), (5.0, None))
    ]
    assert receive_s(steps) == pytest.approx(0.2)
    assert receive_s([{"time/wait_data_s": 3.0}]) == 0.0


def test_kl_and_ess_are_those_of_one_version_in_the_median() -> None:
    window = RecentWindow(CONFIG)
    assert window.kl_per_version == KL_PER_VERSION
    measured = [(1.0, 0.01, 0.98), (2.0, 0.06, 0.9), (4.0, 0.08, 0.84), (0.1, 5.0, 0.0)]
    for version, (staleness, kl, ess) in enumerate(measured):
        window.add_step(version, step_values(
            staleness__mean=staleness, offpolicy__kl_behaviour_proximal_k3=kl, policy__lr_scale=ess**0.5
        ))
    assert window.kl_per_version == pytest.approx(0.02)  # of .01, .03, .02; the last is too fresh to tell
    assert window.ess_loss_per_version == pytest.approx(0.04)  # of .02, .05, .04


def test_what_staleness_has_cost_is_known_also_after_many_steps_without_any() -> None:
    """Such as at depth 0, to which a high cost leads."""
    window = RecentWindow(CONFIG)
    for version in range(60):
        stale = {"staleness__mean": 1.0, "offpolicy__kl_behaviour_proximal_k3": 0.1, "policy__lr_scale": 0.8}
        fresh = {"staleness__mean": 0.0, "offpolicy__kl_behaviour_proximal_k3": 0.0, "policy__lr_scale": 1.0}
        window.add_step(version, step_values(**(stale if version < 10 else fresh)))
    assert window.kl_per_version == pytest.approx(0.1)
    assert window.ess_loss_per_version == pytest.approx(1 - 0.8**2)


def test_the_duration_of_steps_counts_from_a_version_on_if_there_are_four() -> None:
    window = RecentWindow(CONFIG)
    assert not window.is_filled
    for version in range(1, 8):
        window.add_step(version, step_values(time__step_s=float(version)))
    assert window.step_s(3) == pytest.approx((4 + 5 + 6 + 7) / 4)
    assert window.step_s(4) is None
    window.add_groups(records(0.0, (2, 4), 4))
    assert window.is_filled


def test_groups_that_fail_with_their_server_are_not_expected_to_fail_again() -> None:
    """Step 6, in which it was lost, is left out, and with it the 12 groups that the server ran."""
    window = filled()
    for version in range(7, 10):
        values = {"buffer__trained": 4.0 * version, "buffer__dropped_failed": 2.0 * version + 12.0}
        window.add_step(version, step_values(**values))
    assert window.workload(servers=1).failed == pytest.approx(2 / 6)


def test_an_aborted_group_counts_with_twice_its_time_and_not_for_the_load() -> None:
    """It ran for 30 s. The others are at the engine for two thirds of their time."""
    finished = [record._replace(waiting_s=record.sampling_s / 2) for record in records(0.1, (4, 60))]
    load, times = without_load(finished, servers=1, paused=0.0)
    aborted = GroupRecord(1.0, 29.0, 0, 30.0, is_aborted=True)
    same, longer = without_load([*finished, aborted], servers=1, paused=0.0)
    assert same == pytest.approx(load) and np.array(longer[:-1]) == pytest.approx(np.array(times))
    others = 30.0 * 2 / 3  # at the engine
    assert longer[-1] == pytest.approx((40.0 / (1 + load * (others - 1)), 20.0))


def test_aborted_groups_alone_fill_no_window() -> None:
    window = RecentWindow(CONFIG)
    window.add_groups([GroupRecord(1.0, 29.0, 0, 30.0, is_aborted=True)] * 9)
    for version in (1, 2):
        window.add_step(version, step_values())
    assert not window.is_filled
    window.add_groups(records(0.0, (2, 4), 4))
    assert window.is_filled


@pytest.mark.parametrize("difference", [0.0, 1e-15, 1e-12, 1e-9, 1e-6])
@pytest.mark.parametrize("number", [2, 8, 400])
def test_groups_that_met_almost_equally_many_others_give_the_guess(difference: float, number: int) -> None:
    rng = np.random.default_rng(0)
    together = 10.0 * (1 + difference * rng.standard_normal(number))
    alike = records(0.3, (1, 2), number)
    groups = [record._replace(together=float(n)) for record, n in zip(alike, together, strict=True)]
    found, _ = without_load(groups, servers=1, paused=0.0)
    assert found * 10 / (1 + found * 9) == pytest.approx(0.5, abs=0.01)
