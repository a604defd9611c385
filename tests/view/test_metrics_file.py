"""Following metrics.jsonl while a run writes it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from async_rl.view.metrics_file import MAX_POINTS, RECENT_STEPS, MetricsFile, thinned


def lines(*records: dict[str, float | None]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_a_half_written_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"step": 1, "a": 1.0}) + '{"step": 2, "a"')
    metrics = MetricsFile(path).refresh()
    assert metrics.values("a") == {1.0: 1.0}
    with path.open("a") as file:
        file.write(": 5.0}\n")
    assert metrics.refresh().values("a") == {1.0: 1.0, 2.0: 5.0}


def test_damaged_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("garbage\n[1, 2]\n" + lines({"step": 1, "a": 1.0}) + '{"no": "step"}\n')
    metrics = MetricsFile(path).refresh()
    assert (metrics.broken_lines, metrics.values("a")) == (3, {1.0: 1.0})


def test_later_values_of_a_step_win_and_null_is_no_value(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"step": 1, "a": 1.0}, {"step": 1, "a": 2.0}, {"step": 2, "a": None}))
    metrics = MetricsFile(path).refresh()
    assert metrics.values("a") == {1.0: 2.0}
    assert metrics.last("a") == 2.0


def test_a_file_that_a_resume_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}))
    metrics = MetricsFile(path).refresh()
    partial = tmp_path / "partial"
    partial.write_text(lines({"step": 1, "a": 7.0}))
    partial.replace(path)
    assert metrics.refresh().values("a") == {1.0: 7.0}
    assert metrics.generation == 1


def test_a_missing_file_holds_no_metrics(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl").refresh()
    assert (metrics.keys, metrics.last_step, metrics.last("a"), metrics.recent().all()) == ([], 0, None, {})


def test_recent_figures_are_those_of_the_last_steps_weighted_by_their_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [
        {"step": i, "time/written_at_s": i, "time/step_s": (0.4, 9.0)[i % 2], "utilisation/learner": (0.5, 0)[i % 2]}
        for i in range(1, 2 * RECENT_STEPS + 1)
    ]
    path.write_text(lines({**steps[0], "utilisation/learner": 1.0}, *steps[1:], {"step": 2, "eval/accuracy": 0.5}))
    found = MetricsFile(path).refresh().recent()
    assert found.get("time/step_s") == pytest.approx(4.7)
    assert found.get("utilisation/learner") == pytest.approx(0.5 * 0.4 / 9.4)
    assert found.total("time/step_s") == pytest.approx(RECENT_STEPS * 4.7)


def test_thinning_keeps_the_last_step_the_largest_value_and_the_weighted_mean() -> None:
    points = [(float(step), float(step % 2), 1.0 + 2.0 * (step % 2)) for step in range(1, 2 * MAX_POINTS + 1)]
    shown = thinned("utilisation/learner", points)
    assert len(shown) == MAX_POINTS
    assert shown[-1] == (2.0 * MAX_POINTS, 0.75, 4.0)
    assert thinned("staleness/max", points)[-1][:2] == (2.0 * MAX_POINTS, 1.0)
    assert thinned("batch/episodes", [(step, 8.0, 0.0) for step, _, _ in points])[-1] == (2.0 * MAX_POINTS, 8.0, 2.0)
    assert thinned("utilisation/learner", points[:5]) == points[:5]


def test_thinned_series_keep_gaps_in_the_data(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [step for step in range(1, 4 * MAX_POINTS + 1) if not 100 < step <= 200]
    path.write_text("".join(lines({"step": step, "a": 1.0}) for step in steps))
    found = MetricsFile(path).refresh().series(["a"])["a"]
    distances = {after - before for before, after in itertools.pairwise(found["step"])}
    assert (found["stride"], distances) == (4, {4.0, 104.0})
