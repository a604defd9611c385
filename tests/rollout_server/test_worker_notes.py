"""The lines that a worker sends to the console: errors of rewards, and rewards without a difference."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from async_rl.base.errors import NothingToLearnError
from tests.kit.configs import changed, worker_config
from tests.kit.engines.fakes import EchoEngine
from tests.kit.worker import kind_of, rolled_out


def flat_notes(reward: Callable[..., Any], **changes: Any) -> list[str]:
    _, reports, *_ = rolled_out(worker_config(**changes), EchoEngine(), reward, steps=4)
    return [note for report in reports for note in report.notes]


def test_a_run_of_flat_groups_ends_after_an_epoch_of_them_and_is_told_so_before() -> None:
    config, numbers = changed(worker_config(), algorithm={"filter_zero_variance": True}), itertools.count()
    with pytest.raises(NothingToLearnError, match=r"^5\d groups "):
        rolled_out(config, EchoEngine(), lambda question, text: 0.0)
    _, reports, *_ = rolled_out(config, EchoEngine(), lambda question, text: float(max(0, next(numbers) - 60)))
    (note,) = [note for report in reports for note in report.notes]
    assert " 50 " in note


def test_a_difference_in_reward_within_or_between_groups_is_no_flat_reward() -> None:
    assert flat_notes(lambda question, text: float(kind_of(question) % 2)) == []
    numbers = itertools.count()
    assert flat_notes(lambda question, text: float(next(numbers))) == []
