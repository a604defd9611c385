"""Following metrics.jsonl while a run writes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.base.telemetry.metrics import DeclarationFile, Metric
from async_rl.tools.view.growing_files import MAX_POINTS, MOST_STEPS, MetricsFile, thinned

KEY = "reward/mean"


def lines(*records: dict[str, float | None]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_a_half_written_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"step": 1, KEY: 1.0}) + '{"step": 2, "reward/mean"')
    metrics = MetricsFile(path).refresh()
    assert metrics.values(KEY) == [(1.0, 1.0)]
    with path.open("a") as file:
        file.write(": 5.0}\n")
    assert metrics.refresh().values(KEY) == [(1.0, 1.0), (2.0, 5.0)]


def test_damaged_lines_null_and_earlier_values_of_a_step_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = lines({"step": 2, KEY: 1.0}, {"step": 2, KEY: 2.0}, {"step": 3, KEY: None}, {"step": 1, KEY: 0.5})
    path.write_text("garbage\n[1, 2]\n" + good + '{"no": "step"}\n')
    metrics = MetricsFile(path).refresh()
    assert metrics.values(KEY) == [(1.0, 0.5), (2.0, 2.0)]
    assert metrics.last(KEY) == 2.0


def test_a_file_that_a_resume_replaced_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines({"step": 1, KEY: 1.0}, {"step": 2, KEY: 2.0}))
    metrics = MetricsFile(path).refresh()
    partial = tmp_path / "partial"
    partial.write_text(lines({"step": 1, KEY: 7.0}))
    partial.replace(path)
    assert metrics.refresh().values(KEY) == [(1.0, 7.0)]


def test_tiles_show_the_first_and_the_last_steps_weighted_by_their_time(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    steps: list[dict[str, float | None]] = [
        {"step": i, "time/written_at_s": i, "time/step_s": (0.4, 9.0)[i % 2], "utilisation/learner": (0.5, 0)[i % 2]}
        for i in range(1, 2 * MOST_STEPS + 1)
    ]
    path.write_text(lines(*steps, {"step": 2, "eval/accuracy": 0.5}))
    DeclarationFile(tmp_path, resumes=True).add([Metric("utilisation/learner", 0.5, by="time/step_s")])
    start, now, number = MetricsFile(path).refresh().start_and_now()
    assert number == 8
    assert now.get("time/step_s") == pytest.approx(4.7)
    assert now.get("utilisation/learner") == pytest.approx(0.5 * 0.4 / 9.4)
    assert start.get("eval/accuracy") == 0.5


def test_an_alarm_is_on_by_its_newest_value(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(
        {"step": 1, "alarm/kl": 1.0, "alarm/ess": 0.0, "alarm/gold_gap": 0.0},
        {"step": 2, "alarm/kl": 0.0, "alarm/ess": 0.0, "alarm/gold_gap": 1.0},
    ))  # fmt: skip
    assert MetricsFile(path).refresh().alarms() == {"gold gap": (True, 2), "kl": (False, 1)}


def test_long_lines_are_thinned_to_means_and_largest_values() -> None:
    points = [(float(step), float(step % 2)) for step in range(1, 2 * MAX_POINTS + 1)]
    shown = thinned(points)
    assert (len(shown["step"]), shown["step"][-1], shown["value"][-1]) == (MAX_POINTS, 2.0 * MAX_POINTS, 0.5)
    assert thinned(points, "max")["value"][-1] == 1.0
    assert thinned(points[:2]) == {"step": [1.0, 2.0], "value": [1.0, 0.0]}
