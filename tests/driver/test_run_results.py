"""The evaluations in the summary of a run are those of its start and of its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from async_rl.driver.run_results import RunResults
from async_rl.driver.run_timeline import RunTimeline
from async_rl.telemetry.figures import Figures


def summary(folder: Path, *evaluations: tuple[int, float]) -> dict[str, Any]:
    results = RunResults()
    for version, accuracy in evaluations:
        results.add(version, {"eval/accuracy": accuracy})
    return results.summary(20, Figures(), RunTimeline(folder))


def test_an_evaluation_on_the_way_stands_for_neither_start_nor_end(tmp_path: Path) -> None:
    whole = summary(tmp_path, (0, 0.25), (10, 0.5), (20, 0.75))
    assert (whole["accuracy_start"], whole["accuracy_end"]) == (0.25, 0.75)
    without_start = summary(tmp_path, (10, 0.5), (20, 0.75))
    assert (without_start["accuracy_start"], without_start["accuracy_end"]) == (None, 0.75)
    without_end = summary(tmp_path, (0, 0.25), (10, 0.5))
    assert (without_end["accuracy_start"], without_end["accuracy_end"]) == (0.25, None)
