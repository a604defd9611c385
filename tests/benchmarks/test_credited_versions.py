"""The reward of the policy by the version for which an answer of several versions counts, by hand."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.sweeps.results import NO_SUMMARY, Run
from benchmarks.credited_versions import CREDITED, answers_of, curves_of, gains_of, page_of
from buffer.journal.journal import FILE_NAME, Journal


def run_of(staleness: list[int]) -> Run:
    """A run whose steps take 2 s; batch v has one answer of staleness[v], right if it is of version 2 or later."""
    steps = [
        {
            "step": batch + 1.0, "time/since_first_step_s": 2.0 * batch, "time/step_s": 2.0,
            f"staleness/episodes_{age}": 1.0, f"by_staleness/{age}/reward": float(batch - age >= 2),
        } for batch, age in enumerate(staleness)
    ]  # fmt: skip
    labels = {"staleness": "2", "seed": "0"}
    return Run(labels=labels, summary=dict(NO_SUMMARY), steps=steps, evals=[], folder=Path("run"))


def test_an_answer_counts_for_its_oldest_middle_or_newest_version() -> None:
    """The versions 0 to 3 are known after six steps at a staleness of 2. Each answer is of three versions."""
    run = run_of([0, 1, 2, 2, 2, 2])
    answers = [(version, version + 2, float(version >= 2)) for version in (0, 0, 0, 1, 2, 3)]
    curves = curves_of(run, answers)
    assert curves["oldest"] == run.policy_curve
    rewards = {way: [(point.version, point.reward) for point in curve.points] for way, curve in curves.items()}
    assert rewards == {
        "oldest": [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0)], "middle": [(1, 0.0), (2, 0.0), (3, 1.0)],
        "newest": [(2, 0.0), (3, 0.0)],
    }  # fmt: skip
    # Version v is served from 2 (v - 1) s on, and the curve ends with version 4, at 6 s.
    assert [curves[way].mean_over_time(6.0) for way in CREDITED] == pytest.approx([4 / 6, 2 / 6, 0.0])


def test_the_rows_of_an_episode_are_one_answer_in_each_batch_that_trained_on_it(tmp_path: Path) -> None:
    Journal(tmp_path / FILE_NAME, keep_steps=-1).close()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database:
        columns = "group_id, row, episode, oldest_version, newest_version, reward"
        rows = [(7, 0, 0, 3, 4, 0.5), (7, 1, 0, 4, 6, 0.5), (7, 2, 1, 5, 5, 1.0), (8, 0, 0, 1, 2, 0.0)]
        database.executemany(f"INSERT INTO rows ({columns}) VALUES (?, ?, ?, ?, ?, ?)", rows)
        database.execute("INSERT INTO uses (group_id, version) VALUES (7, 6), (7, 7)")
        database.commit()
    assert sorted(answers_of(tmp_path)) == [(3, 6, 0.5), (3, 6, 0.5), (5, 5, 1.0), (5, 5, 1.0)]


def test_a_depth_gains_over_the_bound_of_its_number_in_the_mean_of_the_larger_bounds() -> None:
    def row(*values: float) -> dict[str, list[float]]:
        return {"span": [1.0] * len(values), **{way: list(values) for way in CREDITED}}

    rewards = {
        "0": row(0.1, 0.1), "1": row(0.3, 0.5), "8": row(0.9, 0.9), "1/4": row(0.5, 0.6), "1/8": row(0.7, 0.6),
        "1.25/8": row(0.0, 0.0), "auto/8": row(0.0, 0.0),
    }  # fmt: skip
    gains = gains_of(rewards)
    assert gains == {"1": {way: pytest.approx([0.3, 0.1]) for way in CREDITED}}
    page = page_of("runs/it", rewards)
    # Half of the difference of two values is the standard error of their mean, and t is 0.2 / 0.1 with one degree.
    assert f"| 1 | 0.200 ± 0.100 (p = {1 - 2 * math.atan(2) / math.pi:.4f}) |" in page
    assert "| auto/8 | 1.00 ± 0.00 | 0.000 ± 0.000 |" in page
