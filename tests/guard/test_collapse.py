from __future__ import annotations

import math

import pytest

from async_rl.config.alarms import AlarmsConfig
from async_rl.guard.collapse import COLLAPSE_SIGNALS, collapse_signals, jump, mean_over, reward_fall, stride, surprise
from async_rl.guard.collapse_watch import CollapseFinding, CollapseWatch

SOUND = {
    "reward/mean": 0.5, "reward/std": 0.5, "response/truncated_fraction": 0.1, "response/repeated_fraction": 0.0,
    "policy/entropy": 0.4, "policy/grad_norm": 2.0, "policy/weight_change": 1e-4, "staleness/mean": 1.5,
}  # fmt: skip


def watched(*steps: dict[str, float], **config: float) -> list[CollapseFinding | None]:
    """The findings of all steps, with windows of two steps unless `config` says otherwise."""
    watch = CollapseWatch(AlarmsConfig(**{"window_steps": 2, **config}), right_above=1.0)
    return [watch.add(version, {**SOUND, **step}) for version, step in enumerate(steps, 1)]


def beyond(found: CollapseFinding | None) -> tuple[str, ...]:
    assert found is not None
    return found.beyond


def test_means_are_over_the_steps_that_measured_a_metric() -> None:
    steps = [{"reward/mean": 1.0, "policy/entropy": 2.0}, {"reward/mean": 2.0, "policy/entropy": math.nan, "x": 1.0}]
    assert mean_over(steps) == {"reward/mean": 1.5, "policy/entropy": 2.0}
    assert mean_over([]) == {}


@pytest.mark.parametrize(
    ("newest", "start", "std", "best", "fall", "mean"),
    [
        ([0.5], 0.2, 0.4, 0.8, 0.5, 0.5),  # .3 of a gain of .6
        ([0.2], 0.3, 0.5, 0.4, 0.8, 0.2),  # .2, and a gain of .1 is less than half of the deviation
        ([0.8], 0.2, 0.4, 0.8, 0.0, 0.8),
        ([0.0, 0.0], 0.0, 0.0, 0.0, 0.0, 0.0),  # all rewards are the same
        ([-3.0], 0.0, 2.0, 1.0, 4.0, -3.0),  # rewards may be below 0
        # the newest alone: 1/2 of the whole gain; two: .71 of a half; four: a quarter
        ([0.8, 0.8, 0.8, 0.2], 0.2, 0.4, 0.8, 0.5, 0.2),
        ([0.5, 0.5, 0.5, 0.5], 0.2, 0.4, 0.8, 0.5, 0.5),
    ],
)
def test_the_fall_of_the_reward_is_a_share_of_its_gain_or_of_its_deviation(
    newest: list[float], start: float, std: float, best: float, fall: float, mean: float
) -> None:
    assert reward_fall(newest, start, std, best) == pytest.approx((fall, mean))


def test_each_signal_is_computed_from_the_windows_by_hand() -> None:
    now = {
        "reward/mean": 0.5, "reward/std": 0.2, "response/truncated_fraction": 0.75, "response/repeated_fraction": 0.6,
        "policy/entropy": 0.01, "policy/grad_norm": 0.004, "offpolicy/kl_behaviour_proximal_k3": 0.5,
        "policy/weight_change": 5e-4,
    }  # fmt: skip
    before = {"policy/entropy": 0.2, "offpolicy/kl_proximal_learner_k3": 0.1}
    found = collapse_signals([now], before, SOUND, best=1.1, right_above=1.2, changes=[1e-4, 2e-4, 9e-4])
    values = {name: measured.value for name, measured in found.items()}
    assert values == pytest.approx({
        "reward": 1.0, "jump": 0.7, "stride": 2.5, "cut": 0.65, "all_cut": 0.75, "repeated": 0.6, "entropy": 0.01,
        "gradient": 0.002,
    })  # fmt: skip
    assert set(values) == set(COLLAPSE_SIGNALS)
    only_reward = {"reward/mean": 0.5}
    assert list(collapse_signals([only_reward], {}, only_reward, best=0.5, right_above=1.0, changes=[])) == ["reward"]


def test_a_small_entropy_and_gradient_are_a_success_where_all_rewards_are_the_best() -> None:
    now = {"reward/mean": 1.0, "reward/std": 0.0, "policy/entropy": 1e-9, "policy/grad_norm": 0.0}
    found = collapse_signals([now], {}, SOUND, best=1.0, right_above=1.0, changes=[])
    assert found["entropy"].value == found["gradient"].value == math.inf
    # rewards that differ, none of which can be learned from: the run is stuck below what it could reach
    stuck = collapse_signals(
        [{**now, "reward/mean": 0.6, "reward/std": 0.4}], {}, SOUND, best=0.6, right_above=1.0, changes=[]
    )
    assert stuck["gradient"].value == 0.0 and stuck["entropy"].value == math.inf


def test_an_alarm_begins_when_the_window_has_fallen_and_is_new_once() -> None:
    good, bad = {"reward/mean": 0.9}, {"reward/mean": 0.4}
    # at step 5 the newest step alone shows .71 * .5 / .4, at step 7 both together .25 / .4
    found = watched({}, {}, good, good, bad, bad, good, good)
    assert found[0] is None
    assert [beyond(each) for each in found[1:]] == [(), (), (), ("reward",), ("reward",), ("reward",), ()]
    assert [each.new for each in found[1:] if each] == [(), (), (), ("reward",), (), (), ()]
    fell = found[4]
    assert fell is not None and fell.text("reward") == "the mean reward has fallen from 0.9 to 0.4"
    # at step 4 the learner had made version 3 when it took the batch, of staleness 1.5 at most 2
    assert fell.back_to == 1


def test_a_fall_within_the_first_window_leaves_nothing_to_go_back_to_but_the_start() -> None:
    good, bad = {"reward/mean": 0.9, "staleness/mean": 0.0}, {"reward/mean": 0.0, "staleness/mean": 0.0}
    found = watched(good, good, bad, bad, window_steps=4)[-1]
    assert beyond(found) == ("reward",) and found is not None and found.back_to == 0
    sound = watched(good, good, good, good, window_steps=4)[-1]
    assert beyond(sound) == () and sound is not None and sound.back_to == 3


def test_limits_and_the_window_are_settings() -> None:
    steps = [{}, {}, {"reward/mean": 0.9}, {"reward/mean": 0.9}, {"reward/mean": 0.4}]
    assert beyond(watched(*steps)[-1]) == ("reward",)
    assert beyond(watched(*steps, reward_limit=0.89)[-1]) == ()
    assert beyond(watched(*steps, reward_limit=math.inf)[-1]) == ()
    assert beyond(watched(*steps, window_steps=5)[-1]) == ()  # .64; alone the newest shows .45 * .24 / .25


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("cut", {"response/truncated_fraction": 0.9}),
        ("repeated", {"response/repeated_fraction": 0.9}),
        ("gradient", {"policy/grad_norm": 0.0}),
        ("entropy", {"policy/entropy": 1e-14, "reward/mean": 0.4}),
        ("jump", {"policy/entropy": 1.2, "reward/mean": 0.9}),
    ],
)
def test_each_signal_has_its_alarm_and_its_limit(name: str, step: dict[str, float]) -> None:
    found = watched({}, {}, step, step)[-1]
    assert beyond(found) == (name,) and found is not None and found.text(name)
    off = 0.0 if COLLAPSE_SIGNALS[name].is_floor else math.inf
    assert beyond(watched({}, {}, step, step, **{f"{name}_limit": off})[-1]) == ()


def test_answers_all_cut_off_from_the_start_are_a_caution_unless_right() -> None:
    cut = {"response/truncated_fraction": 0.95, "reward/mean": 0.18}
    found = watched(cut, cut, {**cut, "response/truncated_fraction": 0.5}, cut)
    assert [beyond(each) for each in found[1:]] == [("all_cut",), (), ()]  # the mean over two steps is then .725
    first = found[1]
    assert first is not None and not first.is_serious
    assert first.text("all_cut") == "95% of the answers are cut off, 95% at the start, and rewards are low"
    assert beyond(watched({**cut, "reward/mean": 0.5}, {**cut, "reward/mean": 0.5})[-1]) == ()
    assert beyond(watched(cut, cut, all_cut_limit=math.inf)[-1]) == ()


@pytest.mark.parametrize(
    ("right_above", "reward", "is_low"), [(1.0, 0.49, True), (0.2, 0.15, False), (-1.0, -0.9, False)]
)
def test_low_rewards_are_those_below_half_of_what_counts_as_right(
    right_above: float, reward: float, is_low: bool
) -> None:
    now = {"reward/mean": reward, "response/truncated_fraction": 1.0}
    found = collapse_signals([now], {}, now, reward, right_above, changes=[])
    assert found["all_cut"].value == (1.0 if is_low else 0.0)


@pytest.mark.parametrize(
    ("newest", "before", "value", "now"),
    [
        ({"policy/entropy": 0.9}, {"policy/entropy": 0.5}, 0.8, 0.9),  # it has become unsure
        # stale answers: the policy that trains on them is far from the one that sampled
        ({"policy/entropy": 0.5, "offpolicy/kl_behaviour_proximal_k3": 0.4}, {"policy/entropy": 0.5}, 0.8, 0.9),
        # several passes over the batch: the step itself goes far
        ({"policy/entropy": 0.5, "offpolicy/kl_proximal_learner_k3": 0.4}, {"policy/entropy": 0.5}, 0.8, 0.9),
        # a mean of less than a quarter of a nat counts as that
        ({"policy/entropy": 0.03}, {"policy/entropy": 0.01}, 0.08, 0.03),
        ({"policy/entropy": 0.1}, {"policy/entropy": 0.5}, -0.8, 0.1),
    ],
)
def test_a_jump_is_a_share_of_the_mean_entropy_and_kl_before(
    newest: dict[str, float], before: dict[str, float], value: float, now: float
) -> None:
    found = jump(newest, before)
    assert found is not None and (found.value, found.now) == pytest.approx((value, now))
    assert found.start == pytest.approx(surprise(before))


def test_there_is_no_jump_without_an_entropy_or_a_window_before() -> None:
    assert jump({"reward/mean": 1.0}, {"policy/entropy": 1.0}) is None
    assert jump({"policy/entropy": 1.0}, {}) is None


def test_a_jump_is_an_alarm_only_of_a_run_that_has_learned_something() -> None:
    moved = {"policy/entropy": 0.7}
    assert [beyond(found) for found in watched({}, {}, {}, moved)[1:]] == [(), (), ()]
    better = {"reward/mean": 0.9}
    found = watched({}, {}, better, better, {**better, **moved})[-1]
    assert beyond(found) == ("jump",) and found is not None and found.is_serious
    assert found.text("jump") == "entropy and KL have jumped from 0.4 to 0.7 nats a token in a step"


def test_a_stride_is_a_step_that_moves_the_weights_much_further_than_those_before() -> None:
    better = {"reward/mean": 0.9}
    far = {**better, "policy/weight_change": 5e-4}
    assert beyond(watched({}, {}, better, better, far, stride_limit=6.0)[-1]) == ()
    found = watched({}, {}, better, better, far)[-1]
    assert beyond(found) == ("stride",)
    assert found is not None and found.is_serious
    assert found.text("stride") == "a step has moved the weights 5 times as far as steps usually do"
    assert beyond(watched({}, {}, {}, {"policy/weight_change": 5e-4})[-1]) == ()  # has not learned
    skipped = {**better, "policy/weight_change": 0.0}  # which tells nothing of how far the others went
    usual = {**better, "policy/weight_change": 2e-4}
    assert beyond(watched({}, {}, better, skipped, skipped, usual)[-1]) == ()
    assert stride({"policy/weight_change": 1.0}, []) is None and stride({}, [1.0]) is None


def test_steps_that_grow_little_by_little_become_a_stride_and_a_warm_up_does_not() -> None:
    better = [{"reward/mean": 0.9, "policy/weight_change": 1e-4} for _ in range(5)]
    growing = [{"reward/mean": 0.9, "policy/weight_change": 1e-4 * 1.3**step} for step in range(1, 5)]
    # 1.3^3 is 2.2 and 1.3^4 is 2.9 times the median of all, 1.5 times the mean of the two before
    assert [beyond(found) for found in watched({}, {}, *better, *growing)[1:]] == [()] * 9 + [("stride",)]
    warmed_up = [{"reward/mean": 0.5 + 0.01 * step, "policy/weight_change": 1e-5 * step} for step in range(1, 60)]
    assert all(found is None or found.beyond == () for found in watched(*warmed_up))  # twice the median
