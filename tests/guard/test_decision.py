"""The guard's decision: which signals are trouble, and which version is gone back to."""

from __future__ import annotations

import pickle

import pytest

from async_rl.config.guard import GuardConfig
from async_rl.guard.decision import Finding, Guard

STEP = {
    "batch/episodes": 64.0, "kl/reference": 0.1, "response/length_mean": 10.0, "response/truncated_fraction": 0.0,
    "response/distinct_fraction": 0.9, "reward/mean": 0.0, "reward/std": 1.0,
}  # fmt: skip


def gold(mean: float, squared: float = 0.0, labels: float = 64.0) -> dict[str, float]:
    return {"eval/gold": mean, "eval/gold_squared": squared or mean**2 + 1, "eval/gold_labels": labels}


def run(guard: Guard, steps: range, **changes: float) -> list[Finding]:
    """Add a step for each version, with other values of metrics whose names are given by their last word."""
    names = {"kl": "kl/reference", "length": "response/length_mean", "reward": "reward/mean"}
    values = STEP | {names[name]: value for name, value in changes.items()}
    return [found for version in steps if (found := guard.add(version, values))]


def test_signals_are_means_over_steps_against_the_first_ones() -> None:
    guard = Guard(GuardConfig(every_steps=2))
    first = run(guard, range(1, 5))
    assert [each.version for each in first] == [2, 4]
    assert not any(each.beyond for each in first)
    (found,) = [*run(guard, range(5, 6), length=10.0), *run(guard, range(6, 7), length=30.0)]
    assert found.values["longer"] == 2.0  # the mean of 10 and 30 over 10
    assert (found.beyond, found.new, found.is_trouble) == (("longer",), ("longer",), False)
    assert "answers are 2 times as long as at the start (guard.longer_limit: at most 1.75)" in found.text(
        GuardConfig(), found.new
    )


def test_a_signal_is_new_only_once_while_it_lasts() -> None:
    guard = Guard(GuardConfig(every_steps=1))
    run(guard, range(1, 2))
    assert [each.new for each in run(guard, range(2, 4), length=20.0)] == [("longer",), ()]
    run(guard, range(4, 5))
    assert [each.new for each in run(guard, range(5, 6), length=20.0)] == [("longer",)]


def test_without_gold_rewards_two_kinds_of_signals_are_trouble() -> None:
    guard = Guard(GuardConfig(every_steps=1))
    run(guard, range(1, 10))
    (same_kind,) = run(guard, range(10, 11), kl=2.0)
    assert set(same_kind.beyond) == {"kl", "kl_per_token"} and not same_kind.is_trouble
    (two_kinds,) = run(guard, range(11, 12), kl=2.0, reward=4.0)
    assert two_kinds.is_trouble and two_kinds.back_to == 8
    assert guard.needed() == [8, 9, 10, 11]


def test_signals_that_the_user_has_accepted_make_no_trouble() -> None:
    guard = Guard(GuardConfig(every_steps=1), accepted=["proxy"])
    run(guard, range(1, 2))
    (found,) = run(guard, range(2, 3), kl=2.0, reward=4.0)
    assert "proxy" in found.beyond and not found.is_trouble


def test_with_gold_rewards_they_alone_decide_and_the_best_is_gone_back_to() -> None:
    guard = Guard(GuardConfig(every_steps=1))
    run(guard, range(1, 2))
    for version, mean in ((5, 0.0), (10, 1.0), (15, 2.0), (20, 2.0)):
        found = guard.add(version, gold(mean))
    assert found is not None and not found.is_trouble
    (other,) = run(guard, range(21, 22), kl=2.0, reward=4.0)
    assert not other.is_trouble and other.back_to == 15
    # 5/3 in the mean of 10, 15 and 20, then 1; the error of 192 labels of variance 1 is .072
    last = [guard.add(version, gold(mean)) for version, mean in ((25, 1.0), (30, 0.0))]
    assert [each.is_trouble for each in last if each] == [False, True]
    assert last[-1].back_to == 15 and last[-1].beyond == ("gold_fall",)
    assert guard.needed() == [15, 18, 19, 20, 21, 25, 30]  # by gold rewards, and by the windows of the steps


HACKED = {"kl": 2.0, "reward": 9.0}
"""Means of steps that are beyond the limits of two kinds of signals."""


@pytest.mark.parametrize("evaluations", [(0,), (0, 1)])
def test_before_the_third_evaluation_the_other_signals_decide(evaluations: tuple[int, ...]) -> None:
    """A run without evaluations beside training has the one of version 0 all the same."""
    guard = Guard(GuardConfig(every_steps=1))
    for version in evaluations:
        guard.add(version, gold(1.0))
    run(guard, range(1, 6))
    (found,) = run(guard, range(6, 7), **HACKED)
    assert found.is_trouble and found.back_to == 3


def test_gold_rewards_that_no_longer_come_leave_the_decision_to_the_other_signals() -> None:
    guard = Guard(GuardConfig(every_steps=1))
    for version in range(1, 16):
        run(guard, range(version, version + 1))
        if version % 5 == 0:
            guard.add(version, gold(float(version)))
    run(guard, range(16, 36))
    (lately,) = run(guard, range(35, 36), **HACKED)  # 20 steps after the newest, which with two others spans 10
    assert not lately.is_trouble and lately.back_to == 10
    (found,) = run(guard, range(36, 37), **HACKED)
    assert found.is_trouble and found.back_to == 33 and {33, 34, 35, 36} <= set(guard.needed())


def test_gold_rewards_that_are_all_equal_leave_the_decision_to_the_other_signals() -> None:
    guard = Guard(GuardConfig(every_steps=1))
    for version in range(1, 6):
        run(guard, range(version, version + 1))
        guard.add(version, gold(0.0, squared=0.0, labels=64.0) | {"eval/gold_squared": 0.0})
    (found,) = run(guard, range(6, 7), **HACKED)
    assert found.is_trouble and found.back_to == 3


def test_the_correlation_with_a_rule_is_that_of_the_steps_between_evaluations() -> None:
    guard = Guard(GuardConfig(every_steps=2, gold_correlation_limit=0.1))
    for version in range(1, 7):
        guard.add(version, STEP | {"guard/rule_correlation": 0.0 if version > 4 else 0.09})
        if version % 2 == 0:
            found = guard.add(version, gold(1.0))
    assert found is not None and found.is_trouble and found.beyond == ("gold_correlation",)
    assert round(found.values["gold_correlation"], 6) == 0.06


def test_what_the_guard_keeps_does_not_grow_with_the_steps() -> None:
    guard = Guard(GuardConfig(every_steps=2))
    sizes = []
    for version in range(1, 2001):
        guard.add(version, STEP | {"guard/rule_correlation": 0.5} | dict.fromkeys(map(str, range(100)), 0.0))
        sizes.append(len(pickle.dumps(guard)))
    assert sizes[-1] <= sizes[9] + 16  # the numbers have more digits


def test_an_evaluation_that_a_resumed_run_makes_again_counts_once() -> None:
    guard = Guard(GuardConfig(every_steps=1))
    for version, mean in ((5, 0.0), (10, 1.0), (10, 3.0)):
        assert guard.add(version, gold(mean)) is None, "there are two evaluations"
    found = guard.add(15, gold(5.0))
    assert found is not None and [each for each in guard.needed() if each > 0] == [5, 10, 15]


def test_a_history_read_from_a_file_gives_the_same_as_one_that_was_followed() -> None:
    followed, read = (Guard(GuardConfig(every_steps=1)) for _ in range(2))
    for version in range(1, 9):
        followed.add(version, STEP)
        one = followed.add(version, gold(float(version)))
        both = read.add(version, STEP | gold(float(version)))
    assert one and both and one.back_to == both.back_to and followed.needed() == read.needed()
