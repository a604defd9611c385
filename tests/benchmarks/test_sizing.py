"""The worked examples of a 70 B model."""

from __future__ import annotations

import pytest

from benchmarks.sizing import learner_memory, overlap_gain, transfer_seconds

GB, TB = 1e9, 1e12


def test_ppo_of_70_billion_parameters_takes_2_52_terabytes_and_32_devices_of_80_gigabytes() -> None:
    memory = learner_memory(70e9, "ppo", 80 * GB)
    assert memory.by_role == {
        "policy": 1.12 * TB, "critic": 1.12 * TB, "reference": 0.14 * TB, "reward model": 0.14 * TB
    }  # fmt: skip
    assert memory.total_bytes == pytest.approx(2.52 * TB)
    assert memory.devices == 32


def test_grpo_of_70_billion_parameters_takes_half_of_it() -> None:
    memory = learner_memory(70e9, "grpo", 80 * GB)
    assert memory.total_bytes == pytest.approx(1.26 * TB)
    assert memory.devices == 16


def test_140_gigabytes_over_400_gigabits_a_second_take_2_8_seconds() -> None:
    assert transfer_seconds(140 * GB, 400e9) == pytest.approx(2.8)


def test_a_60_40_split_lifts_the_learner_from_40_percent_to_two_thirds() -> None:
    gain = overlap_gain(rollout_s=60, train_s=40)
    assert gain.learner_in_turn == pytest.approx(0.4)
    assert gain.learner_overlapped == pytest.approx(2 / 3)  # generation takes 60 of every 60 s
    assert gain.speedup == pytest.approx(100 / 60)


def test_a_learner_that_takes_longer_than_generation_is_always_busy() -> None:
    assert overlap_gain(rollout_s=30, train_s=70).learner_overlapped == 1.0
