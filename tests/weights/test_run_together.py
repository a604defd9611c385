from __future__ import annotations

import threading

import pytest

from async_rl.errors import WaitTimeoutError, WeightSyncError
from async_rl.weights.publisher import run_together


def test_the_first_failure_wins_although_another_call_never_returns() -> None:
    def refuse() -> None:
        raise ValueError("no such group")

    with pytest.raises(WeightSyncError, match="push of version 3: http://b failed: no such group"):
        run_together({"learner": threading.Event().wait, "http://b": refuse}, 30.0, "push of version 3")


def test_a_timeout_names_who_was_waited_for() -> None:
    with pytest.raises(WaitTimeoutError, match=r"joining: the learner waited 0 s for http://b$"):
        run_together({"learner": lambda: 1, "http://b": threading.Event().wait}, 0.3, "joining")


def test_results_come_back_by_name() -> None:
    assert run_together({"a": lambda: 1, "b": lambda: 2}, 5.0, "sum") == {"a": 1, "b": 2}
