"""The comparison of batch sizes: equal numbers of answers, the end of a run, and runs that are there already."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.batch_sizes import PROMPTS, RATES, SIZES, BatchRun, made, table
from benchmarks.collapsing_runs import WordsRun, train
from tests.kit.documents import DOCUMENTS
from tests.kit.models import save_tiny_model

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "batch_sizes.md"


def test_the_reward_is_that_of_the_last_eighth_of_the_answers() -> None:
    assert all(PROMPTS % size == 0 for size in SIZES)
    run = BatchRun(4, 1e-4, 0, [0.0] * 280 + [1.0] * 40)
    assert run.end == 1 and BatchRun(4, 1e-4, 0, [0.0] * 240 + [1.0] * 80).end == 1
    assert BatchRun(64, 1e-4, 0, [0.0] * 18 + [0.5, 1.0]).end == 0.75  # 20 steps
    assert BatchRun(64, 1e-4, 0, [1.0] * 18 + [0.5, 0.0]).end == 0.25


def test_the_table_has_means_and_errors_by_size_and_rate() -> None:
    cells = [(size, lr, seed) for size in (4, 16) for lr in (1e-4, 1e-3) for seed in (0, 1)]
    runs = [BatchRun(*cell, [0.4 + 0.2 * cell[2]] * 8) for cell in cells]
    assert table(runs).rows == [["4", "320", "0.500 ± 0.100", "0.500 ± 0.100"], ["16", "80", *["0.500 ± 0.100"] * 2]]


def test_the_table_of_the_page_is_that_of_the_committed_runs() -> None:
    (measured,) = re.findall(r"\| prompts a step.*", RESULT.read_text(), re.DOTALL)
    assert measured.strip() in DOCUMENTS["docs/not-learning.md"]


def test_a_run_that_the_folder_holds_is_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "batch-16-0.0003.1.json").write_text(json.dumps([0.1, 0.2]))
    assert made((16, 3e-4, 1), tmp_path).rewards == [0.1, 0.2]


@pytest.mark.parametrize("prompts", [4, 32])
def test_a_step_trains_on_the_prompts_of_its_batch(prompts: int, tmp_path: Path) -> None:
    save_tiny_model("tiny-qwen2", tmp_path / "model", 0)
    torch.manual_seed(0)
    run = WordsRun("x", 0, RATES[0], steps=1, over={"learner.prompts_per_step": prompts})
    (record,) = train(run, tmp_path / "model")
    assert record["batch/episodes"] == 8 * prompts
