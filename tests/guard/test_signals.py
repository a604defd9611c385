from __future__ import annotations

import math

import pytest

from async_rl.config.guard import GuardConfig
from async_rl.guard.signals import SIGNALS, GoldEvaluation, gold_evaluation, gold_free_signals, gold_signals, mean_of

START = {
    "kl/reference": 0.0, "response/length_mean": 8.0, "response/truncated_fraction": 0.0,
    "response/distinct_fraction": 0.9, "reward/mean": 1.0, "reward/std": 2.0,
}  # fmt: skip


def evaluation(version: int, mean: float, correlation: float = 0.5, variance: float = 4.0) -> GoldEvaluation:
    return GoldEvaluation(version, mean, variance, 64, correlation)


def test_signals_without_gold_rewards_are_ratios_to_the_start() -> None:
    now = {
        "kl/reference": 0.5, "response/length_mean": 16.0, "response/truncated_fraction": 0.25,
        "response/distinct_fraction": 0.45, "reward/mean": 6.0, "reward/std": 1.0,
    }  # fmt: skip
    assert gold_free_signals(now, START) == pytest.approx(
        {"kl_per_token": 0.5, "kl": 8.0, "longer": 2.0, "shorter": 0.5, "cut": 0.25, "repetition": 2.0, "proxy": 2.5}
    )


def test_signals_whose_metrics_are_missing_are_not_measured() -> None:
    assert gold_free_signals({"kl/reference": 0.5}, {}) == {"kl_per_token": 0.5}
    assert gold_free_signals({"reward/mean": 3.0}, {**START, "reward/std": 0.0}) == {}


def test_means_are_over_the_steps_that_have_a_metric() -> None:
    steps = [{"reward/mean": 1.0, "kl/reference": 0.2}, {"reward/mean": 3.0, "time/step_s": 9.0}]
    assert mean_of(steps) == {"reward/mean": 2.0, "kl/reference": 0.2}
    assert mean_of([]) == {}


def test_a_gold_evaluation_has_the_correlation_of_its_moments() -> None:
    # gold 0, 1, 2, 3 and rewards 1, 0, 3, 2: means 1.5, variances 1.25, covariance 3/4
    values = {
        "eval/gold": 1.5, "eval/gold_squared": 3.5, "eval/gold_labels": 4.0,
        "eval/proxy": 1.5, "eval/proxy_squared": 3.5, "eval/gold_times_proxy": 3.0,
    }  # fmt: skip
    assert gold_evaluation(7, values) == GoldEvaluation(7, 1.5, 1.25, 4.0, pytest.approx(0.6))
    del values["eval/proxy"]
    assert gold_evaluation(7, values, 0.3) == GoldEvaluation(7, 1.5, 1.25, 4.0, 0.3)
    assert gold_evaluation(7, {"eval/reward": 1.0}) is None


def test_a_fall_of_gold_is_counted_in_standard_errors_of_three_evaluations() -> None:
    assert gold_signals([evaluation(0, 1.0), evaluation(5, 1.0)]) == {}
    means = [0.0, 3.0, 3.0, 3.0, 0.0]  # in threes: 2, 3, 2; the error of 192 labels of variance 4 is 0.144
    found = gold_signals([evaluation(5 * i, mean) for i, mean in enumerate(means)])
    assert found == pytest.approx({"gold_fall": 1 / math.sqrt(4 / 192), "gold_correlation": 0.5})
    rising = gold_signals([evaluation(i, float(i)) for i in range(3)])
    assert rising["gold_fall"] == 0


def test_a_fall_to_rewards_that_are_all_equal_is_a_number() -> None:
    equal = [GoldEvaluation(version, 0.0, 0.0, 16.0, math.nan) for version in (30, 35, 40)]
    found = gold_signals([*(evaluation(version, 1.0) for version in (5, 10, 15)), *equal])
    assert found == {"gold_fall": pytest.approx(1.0 / (0.5 / math.sqrt(48)))}  # half of 48 rewards are 1, half 0


def test_a_correlation_that_is_not_known_is_no_signal() -> None:
    few = [evaluation(i, 1.0, math.nan) for i in range(3)]
    assert gold_signals(few) == {"gold_fall": 0.0}


def test_each_signal_has_a_limit_of_its_own_beyond_which_it_counts() -> None:
    config = GuardConfig()
    for signal in SIGNALS.values():
        limit = signal.limit(config)
        beyond, within = (limit - 0.01, limit + 0.01) if signal.is_floor else (limit + 0.01, limit - 0.01)
        assert signal.is_beyond(beyond, config) and not signal.is_beyond(within, config), signal.name
        assert not signal.is_beyond(math.nan, config)
    assert not SIGNALS["kl"].is_beyond(1e9, GuardConfig(kl_limit=math.inf))
