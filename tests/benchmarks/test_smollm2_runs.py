"""The runs of SmolLM2-135M: their figures by hand, and the memory of real processes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import psutil
import pytest

from benchmarks.smollm2_runs import add_peaks, of_part, results_of, table_of
from tests.kit.documents import DOCUMENTS

SUMMARY = {
    "accuracy_start": 0.125, "accuracy_end": 0.75, "eval_reward_start": 0.25, "eval_reward_end": 0.875,
    "staleness_mean": 1.0, "tokens_per_s": 30.0, "seconds": 22.0, "utilisation/learner": 0.9,
    "utilisation/rollout": 0.5,
}  # fmt: skip


def test_the_figures_of_a_run_are_those_of_its_summary_and_its_first_and_last_steps(tmp_path: Path) -> None:
    rewards = [0.1, 0.3, *[0.5] * 2, *[0.8] * 8]
    lines = [{"step": 0, "eval/accuracy": 0.125}]
    lines += [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    found = results_of(tmp_path, {"learner": 5.5e9, "rollout": 2.5e9, "all": 9e9}, minutes=7.0)
    assert (found["trained_first"], found["trained_last"]) == pytest.approx((0.2, 0.74))
    assert found["step_s"] == pytest.approx(2.0)  # 22 s over the 11 steps after the first
    (row,) = table_of({3: found}).rows
    assert row == ["3", "0.125", "0.750", "0.250", "0.875", "0.200", "0.740", "1.00", "30", "2.0", "7.0",
                   "5.5", "2.5", "9.0"]  # fmt: skip


def test_the_table_of_the_results_page_is_that_of_the_committed_runs() -> None:
    page = (Path(__file__).parents[2] / "benchmarks" / "results" / "smollm2.md").read_text()
    assert page[page.index("| seed") :].strip() in DOCUMENTS["docs/results.md"]


def test_memory_is_the_largest_of_each_part_and_of_all_together() -> None:
    me = psutil.Process(os.getpid())
    peaks = {"rest": 1.0, "learner": 2.0}
    add_peaks(peaks, [me, me])
    assert peaks["rest"] == peaks["all"] and peaks["rest"] >= me.memory_info().rss and peaks["learner"] == 2.0
    add_peaks(peaks, [])
    assert peaks["all"] > 0


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("ray::LearnerActor", "learner"), ("ray::RolloutActor.work", "rollout"), ("raylet --x", "rest"),
        ("python -m async_rl.cli train configs/smollm2_cpu.yaml", "driver"),
    ],
)
def test_a_process_belongs_to_the_part_that_its_command_line_names(line: str, part: str) -> None:
    assert of_part(line) == part
