"""The grid of exact lags: what its cells sample, train on and measure, on an untrained mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from async_rl.base.config import Sampling
from benchmarks import exact_grid
from benchmarks.exact_grid import ExactCell, Grader, add, ratio_numbers, read, run, task_of, train
from benchmarks.exact_grid_page import chosen, looks, quotient, runs_of
from tests.kit.models import load_model
from tests.kit.tiny_moe import save_moe

pytestmark = pytest.mark.processes  # together they compute for long


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(exact_grid, "MODEL", tmp_path)
    monkeypatch.setattr(exact_grid, "PROMPTS", 6)
    task_of.cache_clear()
    yield save_moe(tmp_path / "model", num_experts=8, num_experts_per_tok=2)
    task_of.cache_clear()


def test_a_cell_of_one_version_is_as_stale_as_its_lag(model: Path) -> None:
    rows = train(ExactCell(0, 2, "1", "TIS", "sampled", engine="float32"), steps=4, every=1)
    assert [row.get("staleness") for row in rows] == [0, 1, 2, 2, None]
    assert rows[0]["ignore_abs"] < 1e-5  # engine and learner have the same weights
    assert rows[2]["ignore_abs"] > 1e-4
    assert [row["unlike"] for row in rows[:-1]] == [0] * 4  # the record is what the engine would return


def test_with_two_versions_an_answer_has_the_experts_of_both(model: Path) -> None:
    rows = train(ExactCell(0, 2, "1", "TIS", "returned", engine="float32", versions="two", lr=1e-2), steps=3, every=2)
    assert rows[0]["unlike"] == 0 and rows[1]["unlike"] > 0
    assert rows[1]["returned_changed"] == 0  # the new version is the learner's own
    assert rows[1]["returned_new_abs"] < 1e-5 < rows[1]["ignore_abs"]


@pytest.mark.parametrize(("sampling", "correction"), [
    ("1", "both"), ("0.9, support", "centering"), ("0.9, no support", "TIS"), ("1", "coupled"),
])  # fmt: skip
def test_every_kind_of_cell_trains(model: Path, sampling: str, correction: str) -> None:
    rows = train(ExactCell(0, 1, sampling, correction, "ignore"), steps=2, every=1)
    assert all(math.isfinite(row["accuracy"]) for row in rows) and rows[1]["grad_norm"] > 0


def test_accuracy_is_the_probability_of_the_right_answers(model: Path) -> None:
    prompts, lm = task_of(0).eval_prompts()[:3], load_model(model)
    expected = []
    for prompt in prompts:
        answer = [*task_of(0)._tokenizer(prompt.question.ground_truth)["input_ids"], lm.config.eos_token_id]
        ids = torch.tensor([[*prompt.tokens.tolist(), *answer]])
        with torch.no_grad():
            steps = lm(ids).logits[0, len(prompt.tokens) - 1 : -1].softmax(-1)
        expected.append(float(np.prod([float(p[token]) for p, token in zip(steps, answer, strict=True)])))
    found = Grader(model, prompts).accuracy(dict(lm.named_parameters()), Sampling(1.0))
    assert found == pytest.approx(np.mean(expected), rel=1e-3)


def test_the_numbers_of_ratios_are_those_of_their_formulas() -> None:
    log_w = torch.tensor([0.5, 2.0]).double().log()
    numbers = ratio_numbers("w", log_w, torch.tensor([0, 3]))
    assert numbers["w_mean"] == pytest.approx(1.25) and numbers["w_var"] == pytest.approx(1.125)  # of n - 1
    assert numbers["w_abs"] == pytest.approx(math.log(2)) and numbers["w_new_abs"] == pytest.approx(math.log(2))
    assert numbers["w_k3"] == pytest.approx(0.25) and numbers["w_ess"] == pytest.approx(2.5**2 / 4.25 / 2)


def test_cells_in_the_file_are_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []

    def note(cell: ExactCell, steps: int, every: int) -> list[dict[str, float]]:
        trained.append(cell)
        return [{"version": 0, "accuracy": 0.25}, {"version": 8, "accuracy": 0.5}]

    monkeypatch.setattr(exact_grid, "train", note)
    file, cells = tmp_path / "grid.csv", [ExactCell(seed, 1, "1", "TIS", "ignore") for seed in range(3)]
    run(iter(cells[:2]), file, 8, 8)
    run(iter(cells), file, 8, 8)
    assert trained == cells
    assert [*runs_of(read(file))] == cells and read(file)[1]["accuracy"] == "0.5"


def test_quotients_leave_out_batches_before_the_lag_is_reached(tmp_path: Path) -> None:
    file, cell = tmp_path / "grid.csv", ExactCell(0, 8, "1", "TIS", "ignore")
    numbers = [(0, 0, 1.0), (4, 4, 1.0), (8, 8, 0.5), (16, 8, 0.125)]
    add(file, cell, [
        {"version": v, "accuracy": 0, "staleness": s, "sampled_var": x, "ignore_var": 1} for v, s, x in numbers
    ], 1.0)  # fmt: skip
    mean, error, count = quotient(looks(chosen(runs_of(read(file)), lag=8)), "sampled_var", "ignore_var")
    assert (mean, count) == (pytest.approx(0.25), 2) and error == pytest.approx(math.log(2))
