"""The table of the kill matrix."""

from __future__ import annotations

from typing import Any

from async_rl.config import WeightSyncConfig
from benchmarks.kill_matrix import outcome_table, push_of


def outcome(kind: str, code: int, recovered_s: float, **more: Any) -> dict[str, Any]:
    known = {"ended_s": 3.0, "names_all": True, "counts_add_up": True, "staleness_max": 2.0, "orphans": 0}
    return known | {"kind": kind, "exit_code": code, "recovered_s": recovered_s, "engine": "hf", "push": "whole",
                    "bound": 2, "placement": "1, 2", "load": 2.0, "commit": "abc"} | more


def test_the_table_has_a_row_for_each_kind_with_what_went_wrong_in_it() -> None:
    outcomes = [
        outcome("worker", 130, 9.0), outcome("worker", 1, 30.0, counts_add_up=False, orphans=2, staleness_max=3.0),
        outcome("worker", 130, 11.0), outcome("learner", 1, 20.0), outcome("learner", 1, 22.0, names_all=False),
        outcome("learner", 1, 18.0, push="changes, disk"),
    ]
    assert outcome_table(outcomes).markdown().splitlines()[2:] == [
        "| worker | hf | whole | 1, 2 | 3 | went on: 2 of 3 | 11.0 (9.0 to 30.0) | - | 2 | 2 | 2 "
        "| 2.0 (2.0 to 2.0) |",
        "| learner | hf | whole | 1, 2 | 2 | one error, then resumed: 1 of 2 | 21.0 (20.0 to 22.0) | 3.0 (3.0 to 3.0) "
        "| 2 | 2 | 0 | 2.0 (2.0 to 2.0) |",
        "| learner | hf | changes, disk | 1, 2 | 1 | one error, then resumed: 1 of 1 | 18.0 (18.0 to 18.0) "
        "| 3.0 (3.0 to 3.0) | 1 | 1 | 0 | 2.0 (2.0 to 2.0) |",
    ]


def test_the_ways_to_push_have_names() -> None:
    ways: list[dict[str, Any]] = [
        {}, {"staging": "device"}, {"lora": "adapter", "transport": "gloo"}, {"delta": True, "transport": "disk"},
    ]
    names = [push_of(WeightSyncConfig(**settings)) for settings in ways]
    assert names == ["whole", "whole, staged (device)", "adapters, gloo", "changes, disk"]
